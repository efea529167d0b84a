#!/bin/bash
# Open MPI 4 and 5, MPICH, Intel MPI: one process on each host, which mpirun numbers.
#   bash examples/launch/mpirun.sh
# Change: the hosts (and --mesh with them), and the two folders. Options of the program may follow.

PROJECT=${PROJECT:-$HOME/lioncub_jax} # the same path on every host, with the environment in .venv
RUN=${RUN:-$HOME/runs/gpt}            # on storage that all hosts share
HOSTS=${HOSTS:-host0,host1,host2,host3}
MPIRUN=${MPIRUN:-mpirun}

cd "$PROJECT" || exit
export JAX_COMPILATION_CACHE_DIR=$RUN/compiled # for the next start
export ASK=USR1                                # for again.sh: Open MPI kills at once after SIGTERM

case $("$MPIRUN" --version) in
  *OpenRTE* | *"Open MPI"*) hosts=(--host "$HOSTS" --map-by node) ;;
  *) hosts=(-hosts "$HOSTS" -ppn 1) ;;
esac
each=${HOSTS//[^,]/}
exec bash examples/launch/again.sh "$MPIRUN" -n $((${#each} + 1)) "${hosts[@]}" \
  .venv/bin/python examples/train_gpt.py \
  --distributed --coordinator "${HOSTS%%,*}:${PORT:-1234}" --heartbeat 30 \
  --mesh data=4 \
  --batch 64 \
  --steps 20000 \
  --checkpoint "$RUN/checkpoints" --save-every 500 --resume \
  --stopped-status 75 \
  --out "$RUN/results" "$@"
