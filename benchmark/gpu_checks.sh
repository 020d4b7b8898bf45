#!/usr/bin/env bash
# Everything that needs a real server on a GPU, in phases, with the tables printed last.
#
#   benchmark/gpu_checks.sh OUT WORK COMMIT PHASE...
#
# OUT      folder of the JSON results and of logs.tgz      WORK   scratch folder (models, logs, traces)
# COMMIT   hash of the code measured
# PHASE    speed      decode_ab at 1k, batch 1 2 4 8, tokens compared (about 3 min on a cold host)
#          long       decode_ab at 8k and 32k, batch 1, prompts kept in the prefix cache (about 2 min)
#          served     speed's and long's cases on one pair of servers of 32k context, prompts kept in the prefix cache
#          fp8        decode_ab of FP8 matrices at 1k, batch 1 2 4 8 (about 3 min)
#          moe        decode_step of Qwen3-30B-A3B by itself, then decode_ab of it at 1k, batch 1 2 4 8: 61 GB of weights a server (about 6 min)
#          profile    as speed, with GPU-only step times from traces (about 5 min)
#          standard   SGLang's own graph and decode_step, GPU time only, with and without LM head (about 3 min)
#          standard-fp8  SGLang's own graph of the model with FP8 matrices (about 3 min)
#          ngram      verify_ab of NGRAM at 1k, batch 1 4 8, tokens compared (about 3 min)
#          drafts     verify_ab of the four draft models at 1k, batch 1 4 (about 5 min, cold caches 7); eagle3 dflash dspark standalone by themselves: one each
#          start      start_ab: launch to ready, servers one at a time, caches warm; memory (about 5 min)
#          scenarios  concurrency, and the refused launches beside it (about 3 min)
#          replay     agentic sessions, then random 8k/1k, at 1 2 4 8 requests at once, on one pair of servers  within REPLAY_S, default
#                     400 s: first 3 turns at half their length, contexts of 6k to 18k, by the direct driver, which needs no package and
#                     no network. REPLAY_ARGS stands for `--model qwen3-8b --scale 0.5`: with `--scale 1` contexts reach 32k and the
#                     sessions take twice the time; on a CPU `--smoke --scale 0.02`
#          replay-moe   Qwen3-30B-A3B, contexts of up to 64k, servers in turn: two starts a repeat, so a call of 580 s has one repeat, and the same
#                     call on the same host goes on with the next (about 15 min in all)
#          replay-aiperf, replay-scenario  Qwen3-8B by aiperf, from the wheels in WHEELS, a folder; scenario: with thinking time, 120 s a run at 1
#                     and 4 (about 16 min each: calls of 580 s that go on). `benchmark.replay … --dry-run` tells what its arguments take
#          ranks      two GPUs: the tensor-parallel step and its timeline, a layer's sums against NCCL and SGLang, a million launches, a killed
#                     rank; no server (about 4 min)
#          tp2        two GPUs: decode_ab of Qwen3-8B, then of Qwen3-30B-A3B, both split over them, at 1k, batch 1 2 4 8 (about 6 min on a cold host)
#          tp2-drafts two GPUs: verify_ab of NGRAM, EAGLE3 and DSPARK, batch 1 and 4 (about 5 min)
#          ranks-hang two GPUs: a server's rank that is stopped, and one that is killed, while a request decodes (about 2 min)
#          hang       needs SITE_PLANTED, an installation with planted bug 3 (about 2 min)
#
# PYTHONPATH must lead to the installed package; `python3` must be the one with SGLang. DEADLINE (s, default 580) is the whole
# run's: a phase gets what is left of it. CACHES, a file: kernels that SGLang, DeepGEMM and Triton compiled. Where it is, it is unpacked
# before the first phase; where it is not, it is written after the last, for the next host of this kind.
set -uo pipefail
out=$1 work=$2 commit=$3
shift 3
cd "$(dirname "$0")/.." && mkdir -p "$out" "$work"
begin=$(date +%s) tables=$work/tables.txt status=0
: > "$tables"

case " $* " in *" replay-aiperf "* | *" replay-scenario "*)
  [ -n "${WHEELS:-}" ] || { echo "replay-aiperf and replay-scenario need WHEELS, a folder of aiperf's wheels" >&2; exit 2; } ;;
esac

left() { echo $((${DEADLINE:-580} - ($(date +%s) - begin) - 10)); }

if [ -f "${CACHES:-}" ]; then tar -C "$HOME" -xzf "$CACHES" || exit 2; fi

phase() {  # NAME MODULE ARGUMENTS...: run one script; its last 45 lines go to the tables
  local name=$1 module=$2
  shift 2
  local since; since=$(date +%s)
  if [ "$(left)" -lt 45 ]; then echo "== $name: no time left" >> "$tables"; return 1; fi
  python3 -m "benchmark.$module" --out "$out" --work "$work/$name" --commit "$commit" --deadline "$(left)" "$@" > "$work/$name.txt" 2>&1
  local code=$? now; now=$(date +%s)
  local how="$name: exit $code, took $((now - since)) s, ended at $((now - begin)) s"
  { echo "== $how"; tail -45 "$work/$name.txt" | cut -c1-420; } >> "$tables"
  echo "$how"
  return $code
}

replay() {  # NAME REPORT ARGUMENTS...: its folder travels as one file; benchmark.report makes the page from it where matplotlib is
  local name=$1 report=$2 runs=$work/$1-runs limit code=0; limit=$(left)
  shift 2
  [ "$limit" -gt "${REPLAY_S:-400}" ] && limit=${REPLAY_S:-400}
  phase "$name" replay "$@" --out "$runs" --deadline "$limit" || code=1
  cp "$runs/report.json" "$out/$report.json" || code=1
  if [ -d "$runs/random-8k-1k" ]; then cp "$runs/random-8k-1k/report.json" "$out/${report/replay/random-8k-1k}.json" || code=1; fi
  tar -C "$runs" -czf "$out/$name-runs.tgz" --exclude=traces/all . || code=1
  return $code
}

for name in "$@"; do
  case $name in
    speed) phase speed serve.decode_ab || status=1 ;;
    profile) phase profile serve.decode_ab --profile || status=1 ;;
    long) phase long serve.decode_ab --name served-qwen3-8b-long --cases 1x8000,1x32000 --radix --compare-tokens 64 || status=1 ;;
    served) phase served serve.decode_ab --name served-qwen3-8b-to-32k --cases 1x1024,2x1024,4x1024,8x1024,1x8000,1x32000 --radix \
      --compare-tokens 64 || status=1 ;;
    fp8) phase fp8 serve.decode_ab --quantization fp8 --compare-tokens 64 || status=1 ;;
    moe)
      phase moe-kernel kernels.decode_step --name kernel-decode-step-moe --models qwen3-30b-a3b --contexts 1024,8000 --rows 1,2,4,8,16 || status=1
      phase moe serve.decode_ab --model qwen3-30b-a3b --server-arg=--mem-fraction-static --server-arg=0.97 --compare-tokens 64 || status=1 ;;
    standard) phase standard kernels.standard_step || status=1 ;;
    standard-fp8) phase standard-fp8 kernels.standard_step --quantization fp8 || status=1 ;;
    ngram) phase ngram serve.verify_ab --algorithm ngram || status=1 ;;
    drafts)
      for draft in eagle3 dflash dspark standalone; do phase "$draft" serve.verify_ab --algorithm "$draft" || status=1; done ;;
    eagle3 | dflash | dspark | standalone) phase "$name" serve.verify_ab --algorithm "$name" || status=1 ;;
    start) phase start serve.start_ab || status=1 ;;
    scenarios)
      phase refusals serve.refusals --parallel 6 &
      refusals=$!
      phase scenarios serve.scenarios || status=1
      wait $refusals || status=1 ;;
    replay)
      # shellcheck disable=SC2086 # REPLAY_ARGS are words
      replay replay replay-qwen3-8b ${REPLAY_ARGS:---model qwen3-8b --scale 0.5} --driver direct --per-lane 1 --turns 3 --peak 32768 \
        --pool-tokens 196608 --beside random-8k-1k || status=1 ;;
    replay-moe)
      REPLAY_S=${REPLAY_S:-570} replay replay-moe replay-qwen3-30b-a3b --model qwen3-30b-a3b --in-turn --driver direct --per-lane 1 --turns 3 \
        --peak 65536 --pool-tokens 524288 --beside random-8k-1k || status=1 ;;
    replay-aiperf)
      REPLAY_S=${REPLAY_S:-570} replay replay-aiperf replay-aiperf-qwen3-8b --model qwen3-8b --aiperf-wheels "$WHEELS" --scale 0.5 \
        --per-lane 1 --turns 3 --peak 32768 --pool-tokens 196608 || status=1 ;;
    replay-scenario)
      REPLAY_S=${REPLAY_S:-570} replay replay-scenario replay-scenario-qwen3-8b --model qwen3-8b --aiperf-wheels "$WHEELS" \
        --mode scenario-timing --duration 120 --scale 0.5 --peak 32768 --pool-tokens 196608 --concurrency 1,4 --repeats 1 || status=1 ;;
    ranks)
      phase ranks-step kernels.parallel_step || status=1
      phase ranks-check kernels.ranks_check || status=1
      phase ranks-sums kernels.peer_sums || status=1 ;;
    tp2)
      phase tp2 serve.decode_ab --tp 2 --compare-tokens 64 || status=1
      phase tp2-moe serve.decode_ab --tp 2 --model qwen3-30b-a3b --compare-tokens 64 || status=1 ;;
    tp2-drafts)
      for draft in ngram eagle3 dspark; do
        phase "tp2-$draft" serve.verify_ab --tp 2 --algorithm "$draft" --batches 1,4 || status=1
      done ;;
    ranks-hang) phase ranks-hang serve.hang --name hang-ranks --cases stopped,killed || status=1 ;;
    hang) PYTHONPATH=$SITE_PLANTED:${PYTHONPATH:-} phase hang serve.hang || status=1 ;;
    *) echo "no phase $name" >&2; exit 2 ;;
  esac
done
(cd "$work" && find . -name '*.log' -o -name '*.txt' | tar -czf "$out/logs.tgz" -T -)
if [ -n "${CACHES:-}" ] && [ ! -f "$CACHES" ]; then
  (cd "$HOME" && find .cache/sglang .cache/flashinfer .cache/tvm-ffi .triton -type f 2> /dev/null | tar -czf "$CACHES" -T -)
fi
tail -c 11000 "$tables"
exit $status
