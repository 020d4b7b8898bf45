#!/usr/bin/env bash
# Everything that needs a real server on a GPU, in phases, with the tables printed last.
#
#   benchmark/gpu_checks.sh OUT WORK COMMIT PHASE...
#
# OUT      folder of the JSON results and of logs.tgz      WORK   scratch folder (models, logs, traces)
# COMMIT   hash of the code measured
# PHASE    speed      decode_ab at 1k, batch 1 2 4 8, tokens compared (about 4 min)
#          long       decode_ab at 8k, batch 1 (about 3 min)
#          profile    as speed, with GPU-only step times from traces (about 5 min)
#          standard   SGLang's own graph and decode_step, GPU time only, with and without LM head (about 3 min)
#          standard-fp8  SGLang's own graph of the model with FP8 matrices (about 3 min)
#          ngram      ngram_ab at 1k, batch 1 4 8, tokens compared (about 5 min)
#          scenarios  concurrency, and the refused launches beside it (about 3 min)
#          hang       needs SITE_PLANTED, an installation with planted bug 3 (about 2 min)
#
# PYTHONPATH must lead to the installed package; `python3` must be the one with SGLang. DEADLINE (s, default 580) is the whole
# run's: a phase gets what is left of it.
set -uo pipefail
out=$1 work=$2 commit=$3
shift 3
cd "$(dirname "$0")/.." && mkdir -p "$out" "$work"
begin=$(date +%s) tables=$work/tables.txt status=0
: > "$tables"

left() { echo $((${DEADLINE:-580} - ($(date +%s) - begin) - 10)); }

phase() {  # NAME MODULE ARGUMENTS...: run one script; its last 45 lines go to the tables
  local name=$1 module=$2
  shift 2
  if [ "$(left)" -lt 45 ]; then echo "== $name: no time left" >> "$tables"; return 1; fi
  python3 -m "benchmark.$module" --out "$out" --work "$work/$name" --commit "$commit" --deadline "$(left)" "$@" > "$work/$name.txt" 2>&1
  local code=$?
  { echo "== $name: exit $code after $(($(date +%s) - begin)) s"; tail -45 "$work/$name.txt" | cut -c1-420; } >> "$tables"
  echo "$name: exit $code, $(($(date +%s) - begin)) s"
  return $code
}

for name in "$@"; do
  case $name in
    speed) phase speed serve.decode_ab || status=1 ;;
    profile) phase profile serve.decode_ab --profile || status=1 ;;
    long) phase long serve.decode_ab --name served-qwen3-8b-8k --contexts 8000 --batches 1 --compare-tokens 64 || status=1 ;;
    standard) phase standard kernels.standard_step || status=1 ;;
    standard-fp8) phase standard-fp8 kernels.standard_step --quantization fp8 || status=1 ;;
    ngram) phase ngram serve.ngram_ab || status=1 ;;
    scenarios)
      phase refusals serve.refusals --parallel 6 &
      refusals=$!
      phase scenarios serve.scenarios || status=1
      wait $refusals || status=1 ;;
    hang) PYTHONPATH=$SITE_PLANTED:${PYTHONPATH:-} phase hang serve.hang || status=1 ;;
    *) echo "no phase $name" >&2; exit 2 ;;
  esac
done
(cd "$work" && find . -name '*.log' -o -name '*.txt' | tar -czf "$out/logs.tgz" -T -)
tail -c 11000 "$tables"
exit $status
