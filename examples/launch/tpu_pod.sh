#!/bin/bash
# Cloud TPU pod slice: the same command on every host; JAX learns from the TPU's metadata where the others
# are. Several slices: create them as one multislice, and use pod=SLICES in MESH.
#   bash examples/launch/tpu_pod.sh
# Change: the name and zone of the slice, the mesh (its product is the number of chips) and the bucket.

TPU=my-slice
ZONE=us-central1-a
MESH=data=8,group=4     # 32 chips
RUN=/mnt/bucket/gpt     # the same bucket or file system, mounted on every host

# The checkout is in ~/lioncub_jax on each host, with its environment (jax[tpu]) in .venv. When a host dies
# the others end at --heartbeat, and all start again from the newest checkpoint.
gcloud compute tpus tpu-vm ssh "$TPU" --zone "$ZONE" --worker=all --command "
  cd lioncub_jax && exec bash examples/launch/again.sh .venv/bin/python examples/train_gpt.py \
    --distributed --heartbeat 20 \
    --mesh $MESH \
    --batch 64 \
    --steps 20000 \
    --checkpoint $RUN/checkpoints --save-every 500 --resume \
    --stopped-status 75 \
    --out $RUN/results
"
