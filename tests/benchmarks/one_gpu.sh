#!/usr/bin/env bash
# On one GPU: step time and MFU of the 1B and a 350M model in bfloat16 at 8192 tokens, by number of passes; then 20 steps of
# tiny in float32 on the GPU and on the CPU, whose losses must agree. Never run so far: no GPU was at hand.
#
#   pip install '.[cuda]' && tests/benchmarks/one_gpu.sh [OUT]
set -euo pipefail
out=${1:-runs/one_gpu}
mkdir -p "$out"
long=(--config.data.seq_len=8192 --config.passes.phases='((0,(0.4,0.3,0.3)),)' --rounds=5)
fbt bench --config=configs/fbt_1b.py --config.data.batch_size=4 "${long[@]}" --json="$out/1b.json"
fbt bench --config=configs/fbt_1b.py --config.data.batch_size=8 --config.model.width=1024 --config.model.num_layers=18 \
    --config.model.mlp_width=4096 --config.model.remat=dots "${long[@]}" --json="$out/350m.json"
same=(--config=configs/tiny.py --config.model.dtype=float32 --config.training.steps=20 --config.training.log_every=1
    --config.training.eval_every=20 --config.training.eval_rows=16 --config.passes.phases='((0,(0.4,0.3,0.3)),)')
NVIDIA_TF32_OVERRIDE=0 fbt train "${same[@]}" --workdir="$out/gpu"
JAX_PLATFORMS=cpu fbt train "${same[@]}" --workdir="$out/cpu"
python - "$out" <<'END'
import json, sys
losses = [[json.loads(line)['loss'] for line in open(f'{sys.argv[1]}/{d}/metrics.jsonl') if '"train"' in line] for d in ('gpu', 'cpu')]
worst = max(abs(a - b) / b for a, b in zip(*losses, strict=True))
print(f'20 steps, GPU against CPU: largest relative difference of the loss {worst:.2e}')
sys.exit(worst > 1e-3)
END
