#!/usr/bin/env bash
# Does feedback pay? Trains feedback models and two baselines at three sizes, three seeds each, and compares them:
#
#     launch/pays.sh                             # all of it: a night on two CPU cores
#     launch/pays.sh small,medium 0,1 runs/pays  # some sizes, some seeds, another folder
#
# feedback   configs/pays_SIZE.py
# baseline   the same model without feedback, for as many tokens
# long       that for as many token-passes: twice the steps, since a step makes two passes in the mean
#
# Each size's table, figures and picture: DIR/SIZE.md, SIZE.json, SIZE.png. Started again, it goes on where it was. It
# ends with the first command that fails.
set -euo pipefail
[ $# -le 3 ] || { echo 'usage: launch/pays.sh [SIZE,... [SEED,... [DIR]]]' >&2; exit 2; }
IFS=, read -ra sizes <<< "${1:-small,medium,large}"
IFS=, read -ra seeds <<< "${2:-0,1,2}"
dir=${3:-runs/pays}
configs=$(dirname "$0")/../configs
plain=(--config.model.fusion=none --config.passes.phases=one_pass)

for size in "${sizes[@]}"; do
    [ -f "$configs/pays_$size.py" ] || { echo "launch/pays.sh: no size $size; must be of small, medium, large" >&2; exit 2; }
done
for size in "${sizes[@]}"; do
    long=() baseline=() feedback=()
    for seed in "${seeds[@]}"; do
        train=(fbt train "--config=$configs/pays_$size.py" "--config.seed=$seed")
        feedback+=("$dir/${size}_feedback_seed$seed") baseline+=("$dir/${size}_baseline_seed$seed") long+=("$dir/${size}_long_seed$seed")
        "${train[@]}" "--workdir=${feedback[-1]}"
        "${train[@]}" "--workdir=${baseline[-1]}" "${plain[@]}"
        "${train[@]}" "--workdir=${long[-1]}" "${plain[@]}" --config.training.steps=2280 --config.training.eval_every=190
    done
    # The longer baseline first, since nothing is extrapolated beyond the first one's curve.
    fbt compare "${long[@]}" "${baseline[@]}" "${feedback[@]}" "--json=$dir/$size.json" "--plot=$dir/$size.png" | tee "$dir/$size.md"
done
