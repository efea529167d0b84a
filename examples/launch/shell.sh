#!/bin/bash
# Plain shells: the same command on each host, by ssh, a terminal or a unit of systemd, and its number.
#   for i in 0 1 2 3; do ssh "host$i" "bash lioncub_jax/examples/launch/shell.sh host0:1234 4 $i" & done; wait
# Change: the mesh, and the two folders. Options of the program may follow.

PROJECT=${PROJECT:-$HOME/lioncub_jax} # the checkout, with its environment in .venv
RUN=${RUN:-$HOME/runs/gpt}            # on storage that all hosts share
ADDRESS=$1 HOSTS=$2 INDEX=$3
shift 3

cd "$PROJECT" || exit
export JAX_COMPILATION_CACHE_DIR=$RUN/compiled # for the next start

# When a process dies the others end, and the scripts of all hosts start theirs again.
exec bash examples/launch/again.sh .venv/bin/python examples/train_gpt.py \
  --coordinator "$ADDRESS" --processes "$HOSTS" --process "$INDEX" --heartbeat 30 \
  --mesh data=4 \
  --batch 64 \
  --steps 20000 \
  --checkpoint "$RUN/checkpoints" --save-every 500 --resume \
  --stopped-status 75 \
  --out "$RUN/results" "$@"
