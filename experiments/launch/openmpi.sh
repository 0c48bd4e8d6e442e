#!/bin/bash
# One process a GPU on the hosts of a host file ("node1 slots=8" a line).
#
#   experiments/launch/openmpi.sh hosts small --mesh replica=2,fsdp=8 --run runs/small-1 --continue
set -eu
hosts=$1
shift
first=$(awk '!/^#/ && NF { print $1; exit }' "$hosts")
export MASTER_ADDR=$first
# Known to this job alone: nobody else who reaches its port can take a place in it.
JAXINFRA_TOKEN=$(openssl rand -hex 16)
export JAXINFRA_TOKEN

# mpirun passes SIGTERM on, and ends all ranks when one fails; its exit code is that rank's.
exec mpirun --hostfile "$hosts" --map-by slot --bind-to none \
    -x MASTER_ADDR -x JAXINFRA_TOKEN -x PATH \
    jaxinfra train "$@"
