#!/bin/sh
# Nsight Compute on one op:  bench/ncu.sh SUITE OP [CASE [BATCH]]  ->  build/ncu/OP.ncu-rep
# One warm call of ours a case is in the profiler's range. Clocks are left alone. --set full takes
# about 40 passes a kernel: name a case and a batch. NCU_ARGS adds options, e.g. "--launch-count 3".
set -e
[ $# -ge 2 ] || { echo "usage: bench/ncu.sh SUITE OP [CASE [BATCH]]" >&2; exit 2; }
cd "$(dirname "$0")/.."
mkdir -p build/ncu
PYTHONPATH="$PWD:$PWD/python${PYTHONPATH:+:$PYTHONPATH}" \
exec ncu --profile-from-start off --nvtx --nvtx-include "profile_target/" \
  --set full --import-source yes --clock-control none ${NCU_ARGS:-} \
  --force-overwrite --export "build/ncu/$2" \
  "${PYTHON:-python3}" -m bench "$1" --op "$2" ${3:+--case "$3"} ${4:+--batch "$4"} --profile
