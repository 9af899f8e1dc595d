"""Prepared folders: what the shards hold, that kills and threads leave no trace, what is refused. Bytes: BOS is 256."""

import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from helpers_data import BYTES, make, write_jsonl

from fbt_jax.config import DataConfig
from fbt_jax.data import corpus
from fbt_jax.data import prepare as prepare_module
from fbt_jax.data.documents import RECORD_TOKENS, Parts, Prepared
from fbt_jax.data.packing import StreamRows
from fbt_jax.data.prepare import pieces_of
from fbt_jax.data.tokenizer import open_tokenizer
from fbt_jax.errors import UserError

BPE = open_tokenizer(DataConfig(tokenizer='bpe'))


def whole(folder: Path) -> list[list[int]]:
    """Every document, as stored, by the random access of training."""
    found = Prepared(folder)
    documents = []
    for shard, count in enumerate(found.documents_S.tolist()):
        units = np.arange(count)
        parts = Parts(np.full(count, shard), units, np.zeros(count, np.int64), found.lengths(shard))
        documents += [tokens.tolist() for tokens in found.read(parts)]
    return documents


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.fixture(scope='module')
def novels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The validation chapters of the embedded corpus and some short documents, as JSONL in two files."""
    folder = tmp_path_factory.mktemp('novels')
    texts = [*corpus.split().validation, *(f'document {i}' for i in range(300))]
    write_jsonl(folder / 'b.jsonl', texts[100:])
    write_jsonl(folder / 'a.jsonl', texts[:100])
    return folder


def test_shards_hold_the_documents_between_bos_and_eos(novels: Path, tmp_path: Path) -> None:
    texts = [json.loads(line)['text'] for name in 'ab' for line in (novels / f'{name}.jsonl').open()]
    index = make(f'jsonl:{novels}/*.jsonl', tmp_path / 'bytes', shard_tokens=60_000)
    assert whole(tmp_path / 'bytes') == [[256, *text.encode(), 257] for text in texts]
    assert index['documents'] == len(texts) == sum(s['documents'] for s in index['shards'])
    assert index['bytes'] == sum(len(text.encode()) for text in texts)
    assert index['tokens'] == index['bytes'] + 2 * len(texts) == sum(s['tokens'] for s in index['shards'])
    # A shard ends with the document that fills it.
    assert all(60_000 <= s['tokens'] < 60_000 + max(map(len, texts)) + 2 for s in index['shards'][:-1])
    assert len(index['shards']) > 2

    make(f'jsonl:{novels}/*.jsonl', tmp_path / 'bpe', tokenizer=BPE)
    assert whole(tmp_path / 'bpe') == [[BPE.bos_id, *BPE.encode(text), BPE.eos_id] for text in texts]


def test_a_part_of_a_long_document_is_read_from_the_records_it_lies_in(tmp_path: Path) -> None:
    text = ''.join(random.Random(0).choices('abcdefg', k=3 * RECORD_TOKENS + 50))
    write_jsonl(tmp_path / 'a.jsonl', ['before', text, 'after'])
    make(f'jsonl:{tmp_path}/a.jsonl', tmp_path / 'out')
    tokens = np.array([256, *text.encode(), 257])
    found = Prepared(tmp_path / 'out')
    bounds = [
        0,
        1,
        7,
        RECORD_TOKENS - 1,
        RECORD_TOKENS,
        RECORD_TOKENS + 1,
        2 * RECORD_TOKENS,
        len(tokens) - 1,
        len(tokens),
    ]
    for start in bounds:
        for stop in (b for b in bounds if b > start):
            (part,) = found.read(Parts(*(np.array([x]) for x in (0, 1, start, stop))))
            np.testing.assert_array_equal(part, tokens[start:stop])


def test_prompts_are_read_but_are_no_targets(tmp_path: Path) -> None:
    write_jsonl(tmp_path / 'a.jsonl', [{'q': 'ab', 'a': 'cde'}, {'q': '', 'a': 'f'}])
    make(f'jsonl:{tmp_path}/a.jsonl#key=a,prompt_key=q', tmp_path / 'out')
    found = Prepared(tmp_path / 'out')
    batch = StreamRows(found, seq_len=9, seed=None).batch([0])
    assert batch.tokens[0].tolist() == [256, *b'abcde', 257, 256, *b'f']
    assert batch.targets[0].tolist() == [*b'abcde', 257, 256, *b'f', 257]
    assert batch.weights[0].tolist() == [0, 0, 1, 1, 1, 1, 0, 1, 1]


def test_kills_leave_no_trace(novels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ended at ten random moments in one process's life after the other; the folder is what an unbroken one has."""
    monkeypatch.setattr(prepare_module, 'BLOCK_CHARACTERS', 3000)
    unbroken = tmp_path / 'unbroken'
    make(f'jsonl:{novels}/*.jsonl', unbroken, shard_tokens=30_000)
    out = tmp_path / 'out'
    rng = random.Random(1)
    for _ in range(10):
        left = rng.randrange(1, 12)

        def poll() -> None:
            nonlocal left
            left -= 1
            if not left:
                raise KeyboardInterrupt

        try:
            make(f'jsonl:{novels}/*.jsonl', out, shard_tokens=30_000, poll=poll)
        except KeyboardInterrupt:
            with pytest.raises(UserError, match='not complete: the same `fbt data prepare` goes on with it'):
                Prepared(out)
            with (out / 'progress.jsonl').open('a') as file:  # a line that was being written
                file.write('{"documents": 3')
    make(f'jsonl:{novels}/*.jsonl', out, shard_tokens=30_000)
    assert files_of(out) == files_of(unbroken)
    assert make(f'jsonl:{novels}/*.jsonl', out, shard_tokens=30_000)['documents'] == 313  # and nothing is done again


@pytest.mark.slow
def test_sigkills_and_threads_leave_no_trace(tmp_path: Path) -> None:
    texts = [*corpus.split().train, *corpus.split().validation] * 8
    write_jsonl(tmp_path / 'a.jsonl', texts)
    code = (
        'import sys; from fbt_jax.data import prepare as p; p.BLOCK_CHARACTERS = 2**16; p.SHARD_TOKENS = 2**17;'
        'p.prepare.__kwdefaults__["shard_tokens"] = 2**17;'
        'from fbt_jax.cli import main; sys.exit(main(sys.argv[1:]))'
    )

    def start(out: str, workers: int) -> subprocess.Popen[bytes]:
        arguments = ['data', 'prepare', f'--source=jsonl:{tmp_path}/a.jsonl', '--tokenizer=bpe']
        arguments += [f'--out={tmp_path / out}', f'--workers={workers}']
        return subprocess.Popen(
            [sys.executable, '-c', code, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )

    for workers in (1, 2):
        assert start(f'unbroken{workers}', workers).wait() == 0
    rng = random.Random(0)
    kills = 0
    for _ in range(20):
        process = start('killed', rng.choice((1, 2)))
        time.sleep(rng.uniform(0.3, 1.5))
        if process.poll() is not None:
            break
        process.send_signal(signal.SIGKILL)
        process.wait()
        kills += 1
    assert start('killed', 2).wait() == 0
    assert kills > 3
    assert files_of(tmp_path / 'unbroken1') == files_of(tmp_path / 'unbroken2') == files_of(tmp_path / 'killed')


def test_long_texts_are_cut_where_words_begin() -> None:
    text = 'one two\n\n  three\nfour five  six' * 40
    for limit in (8, 20, 31, 100):
        pieces = pieces_of(text, limit)
        assert ''.join(pieces) == text
        assert all(0 < len(piece) <= limit for piece in pieces)
        assert all(a[-1] == '\n' or b[0] == ' ' for a, b in itertools.pairwise(pieces)) or limit == 8
    assert pieces_of('x' * 25, 10) == ['x' * 10, 'x' * 10, 'x' * 5]
    assert pieces_of('', 10) == []


def test_cutting_long_texts_does_not_change_their_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = '\n'.join(corpus.split().validation)
    write_jsonl(tmp_path / 'a.jsonl', [text])
    monkeypatch.setattr(prepare_module, 'PIECE_CHARACTERS', 5000)
    make(f'jsonl:{tmp_path}/a.jsonl', tmp_path / 'out', tokenizer=BPE)
    assert whole(tmp_path / 'out') == [[BPE.bos_id, *BPE.encode(text), BPE.eos_id]]


def test_documents_left_out_are_counted_and_named(tmp_path: Path) -> None:
    (tmp_path / 'a.jsonl').write_bytes(b'{"text": "a"}\n{"text": ""}\n{"text": "\xff"}\n{"text": "b"}\n{"text": ""}\n')
    index = make(f'jsonl:{tmp_path}/a.jsonl', tmp_path / 'out')
    assert whole(tmp_path / 'out') == [[256, 97, 257], [256, 98, 257]]
    assert index['skipped'] == {'empty': 2, 'not UTF-8': 1}
    assert [line.split(': ')[1] for line in index['first_skipped']] == ['empty', 'not UTF-8', 'empty']
    (tmp_path / 'b.jsonl').write_text('{"text": ""}\n')
    with pytest.raises(UserError, match=r'b\.jsonl holds no document \(1 empty\): 1 file$'):
        make(f'jsonl:{tmp_path}/b.jsonl', tmp_path / 'none')


def test_a_tokenizer_that_puts_its_own_ends_is_refused(tmp_path: Path) -> None:
    class Doubling:
        vocab_size, bos_id, eos_id, fingerprint, file = 258, 256, 257, '', None
        token_bytes = BYTES.token_bytes

        def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
            return [np.array([*text.encode(), 257] if text == 'b' else [*text.encode()], np.uint32) for text in texts]

    write_jsonl(tmp_path / 'a.jsonl', ['a', 'b', 'c'])
    with pytest.raises(UserError, match=r'^a\.jsonl:line 2: the tokenizer encodes a text to BOS or EOS'):
        make(f'jsonl:{tmp_path}/a.jsonl', tmp_path / 'out', tokenizer=Doubling())


def test_a_folder_that_holds_something_else_is_left_alone(tmp_path: Path) -> None:
    write_jsonl(tmp_path / 'a.jsonl', ['a'])
    source = f'jsonl:{tmp_path}/a.jsonl'
    make(source, tmp_path / 'out')
    before = files_of(tmp_path / 'out')
    with pytest.raises(UserError, match='holds data made with another tokenizer'):
        make(source, tmp_path / 'out', tokenizer=BPE)
    with pytest.raises(UserError, match='was made with shard_tokens = 16777216, not 5'):
        make(source, tmp_path / 'out', shard_tokens=5)
    with pytest.raises(UserError, match=r"was made with options = \{\}, not \{'except_every': '2'\}; use a new folder"):
        make(f'{source}#except_every=2', tmp_path / 'out')
    write_jsonl(tmp_path / 'a.jsonl', ['longer'])
    with pytest.raises(UserError, match=r'was made from other files: a\.jsonl came, went or changed size'):
        make(source, tmp_path / 'out')
    assert files_of(tmp_path / 'out') == before
    (tmp_path / 'mine').mkdir()
    (tmp_path / 'mine' / 'letter.txt').write_text('dear')
    with pytest.raises(UserError, match='is not empty and holds no prepared data'):
        make(source, tmp_path / 'mine')
    assert files_of(tmp_path / 'mine') == {'letter.txt': b'dear'}


def test_two_at_once_in_one_folder_are_refused(tmp_path: Path) -> None:
    write_jsonl(tmp_path / 'a.jsonl', ['a'])

    def poll() -> None:
        with pytest.raises(UserError, match='another process is preparing data there'):
            make(f'jsonl:{tmp_path}/a.jsonl', tmp_path / 'out')

    write_jsonl(tmp_path / 'b.jsonl', ['a' * 100] * (prepare_module.BLOCK_CHARACTERS // 100 + 1))
    make(f'jsonl:{tmp_path}/b.jsonl', tmp_path / 'out', poll=poll)


@pytest.mark.parametrize('damage', ['truncated', 'gone', 'overwritten', 'lengths gone', 'of another shard'])
def test_a_damaged_shard_is_named(tmp_path: Path, damage: str) -> None:
    write_jsonl(tmp_path / 'a.jsonl', [str(i) * 3000 for i in range(100)])
    make(f'jsonl:{tmp_path}/a.jsonl', tmp_path / 'out', shard_tokens=200_000)
    shard = tmp_path / 'out' / 'shard-00001.array_record'
    match damage:
        case 'truncated':
            os.truncate(shard, shard.stat().st_size // 2)
        case 'gone':
            shard.unlink()
        case 'overwritten':
            shard.write_bytes(os.urandom(shard.stat().st_size))
        case 'lengths gone':
            shard.with_suffix('.npy').unlink()
        case 'of another shard':
            shard.write_bytes((tmp_path / 'out' / 'shard-00000.array_record').read_bytes())
    with pytest.raises(UserError, match=r'shard-00001\.array_record is missing or damaged: .') as error:
        rows = StreamRows(Prepared(tmp_path / 'out'), seq_len=1000, seed=None)
        rows.batch(range(rows.num_rows))
    assert '\n' not in str(error.value)


def test_a_flipped_bit_is_found_or_changes_nothing(tmp_path: Path) -> None:
    """ArrayRecord fills its blocks up with bytes that nobody reads; all others are under its checksums."""
    write_jsonl(tmp_path / 'a.jsonl', [random.Random(0).randbytes(50_000).hex()])
    make(f'jsonl:{tmp_path}/a.jsonl', tmp_path / 'out')
    shard = tmp_path / 'out' / 'shard-00000.array_record'
    data, expected = shard.read_bytes(), whole(tmp_path / 'out')
    found = 0
    for place in range(100, len(data), len(data) // 40):
        shard.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        try:
            assert whole(tmp_path / 'out') == expected
        except UserError as error:
            assert 'missing or damaged' in str(error)
            found += 1
    assert found > 5


@pytest.mark.slow
def test_memory_is_flat_over_a_million_documents(tmp_path: Path) -> None:
    """Peak memory of preparing and of reading an epoch; three times the documents add what their order takes."""
    code = """
import sys
from pathlib import Path
from fbt_jax.config_data import DataConfig, parse_source
from fbt_jax.data.documents import Prepared
from fbt_jax.data.packing import StreamRows
from fbt_jax.data.prepare import prepare
from fbt_jax.data.tokenizer import open_tokenizer

def peak():
    return next(int(line.split()[1]) // 1024 for line in Path('/proc/self/status').open() if line.startswith('VmHWM'))

folder = Path(sys.argv[1])
tokenizer = open_tokenizer(DataConfig(tokenizer='bytes'))
prepare(parse_source(f'text:{folder}/lines.txt#unit=line'), tokenizer, folder / 'out', progress_bar=False)
prepared = peak()
rows = StreamRows(Prepared(folder / 'out'), seq_len=2048, seed=0)
for start in range(0, rows.epoch_rows, 64):
    rows.batch(range(start, start + 64))
print(prepared, peak())
"""
    peaks = {}
    for count in (300_000, 1_000_000):
        folder = tmp_path / str(count)
        folder.mkdir()
        (folder / 'lines.txt').write_text(''.join(f'document {i} of many\n' for i in range(count)))
        printed = subprocess.run(
            [sys.executable, '-c', code, str(folder)], capture_output=True, text=True, check=True
        ).stdout
        peaks[count] = [int(x) for x in printed.split()]
    print(peaks)
    assert peaks[1_000_000][0] - peaks[300_000][0] < 50  # MiB
    assert peaks[1_000_000][1] - peaks[300_000][1] < 150
