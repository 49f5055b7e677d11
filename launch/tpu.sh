#!/usr/bin/env bash
# Runs specjax on a Cloud TPU (a single host or a pod slice):
#
#   launch/tpu.sh create
#   launch/tpu.sh setup
#   launch/tpu.sh run my_run.gin --gin.INPUT=data/captions.txt
#   launch/tpu.sh logs
#   launch/tpu.sh fetch
#   launch/tpu.sh delete
#
# A TPU costs money from `create` to `delete`. `--dry-run` prints the commands and runs none. Set the
# variables below here or in the environment; docs/cloud_tpu.md explains them.
set -euo pipefail

# The TPU.
PROJECT="${PROJECT:-}"
ZONE="${ZONE:-us-central1-a}"
TPU_NAME="${TPU_NAME:-specjax}"
ACCELERATOR_TYPE="${ACCELERATOR_TYPE:-v5litepod-8}"
RUNTIME_VERSION="${RUNTIME_VERSION:-}"
# on-demand, spot, queued, queued-spot or flex-start.
MODE="${MODE:-on-demand}"
MAX_RUN_DURATION="${MAX_RUN_DURATION:-4h}"
VALID_UNTIL_DURATION="${VALID_UNTIL_DURATION:-}"
CREATE_FLAGS="${CREATE_FLAGS:-}"
SSH_FLAGS="${SSH_FLAGS:-}"

# The run.
BUCKET="${BUCKET:-}"
DATA="${DATA:-}"
RUN_NAME="${RUN_NAME:-run}"
COMMAND="${COMMAND:-infer}"
EXTRAS="${EXTRAS:-tpu,eval,int8,constraints,gguf}"
PYTHON="${PYTHON:-}"
SYNC_SECONDS="${SYNC_SECONDS:-60}"
FETCH_DIR="${FETCH_DIR:-fetched}"
LINES_SHOWN="${LINES_SHOWN:-50}"
WORKER="${WORKER:-all}"

# Limits.
CREATE_ATTEMPTS="${CREATE_ATTEMPTS:-5}"
RETRY_SECONDS="${RETRY_SECONDS:-60}"
WAIT_SECONDS="${WAIT_SECONDS:-7200}"
POLL_SECONDS="${POLL_SECONDS:-30}"
SSH_ATTEMPTS="${SSH_ATTEMPTS:-3}"
RESTARTS="${RESTARTS:-5}"

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
DRY_RUN=""
DETACH=""
# The checkout on a worker, in its home directory.
REMOTE=specjax

say() { printf 'specjax launch: %s\n' "$*" >&2; }

die() {
  say "$*"
  exit 1
}

usage() {
  cat >&2 <<'TEXT'
usage: launch/tpu.sh [--dry-run] COMMAND

  create                      creates the TPU and waits until it is ready
  setup                       installs this checkout on all workers
  run [--detach] FILE.gin [ARGUMENT ...]
                              starts `specjax infer --gin_file=FILE.gin ARGUMENT ...` on all
                              workers and watches it; replaces a pre-empted TPU
  stop                        stops the run on all workers
  logs                        shows the end of each worker's log
  fetch                       copies the results to FETCH_DIR
  delete                      deletes the TPU and its request in the queue

Variables: see the top of launch/tpu.sh, and docs/cloud_tpu.md.
TEXT
  exit 2
}

is_whole() { [[ $1 =~ ^(0|[1-9][0-9]{0,8})$ ]]; }

# Prints words with quotes, as a shell reads them.
quoted() {
  local word words=()
  for word in "$@"; do
    [[ $word =~ ^[A-Za-z0-9_./:=,@%+-]+$ ]] || word=${word@Q}
    words+=("$word")
  done
  printf '%s' "${words[*]}"
}

# Runs a command that changes something; a dry run prints it.
act() {
  if [[ -n $DRY_RUN ]]; then
    printf '%s\n' "$(quoted "$@")" >&3
  else
    "$@" 3>&-
  fi
}

# shellcheck source=launch/machine.sh
source "$ROOT/launch/machine.sh"
# shellcheck source=launch/jobs.sh
source "$ROOT/launch/jobs.sh"

main() {
  local words=() word
  # Before 4.4 (macOS), bash treats an empty list as unset.
  ((BASH_VERSINFO[0] * 100 + BASH_VERSINFO[1] >= 404)) ||
    die "this script needs bash 4.4 or later, got $BASH_VERSION (macOS: brew install bash)"
  for word in "$@"; do
    case $word in
      --dry-run) DRY_RUN=1 ;;
      --detach) DETACH=1 ;;
      *) words+=("$word") ;;
    esac
  done
  # Before any arithmetic, which would run a command in its text.
  for word in LINES_SHOWN CREATE_ATTEMPTS WAIT_SECONDS SSH_ATTEMPTS RESTARTS; do
    is_whole "${!word}" || die "$word must be a whole number, got '${!word}'"
  done
  for word in SYNC_SECONDS RETRY_SECONDS POLL_SECONDS; do
    [[ ${!word} =~ ^[0-9]{1,9}(\.[0-9]{1,9})?$ ]] || die "$word must be a number, got '${!word}'"
  done
  [[ $WORKER == all ]] || is_whole "$WORKER" ||
    die "WORKER must be all or a whole number, got '$WORKER'"
  PLACE=(--zone="$ZONE" --quiet)
  [[ -z $PROJECT ]] || PLACE+=(--project="$PROJECT")
  [[ -n $DRY_RUN ]] || command -v gcloud >/dev/null ||
    die "gcloud is not on PATH: install the Google Cloud CLI"
  [[ $RUN_NAME =~ ^[A-Za-z0-9][A-Za-z0-9_.-]*$ ]] ||
    die "RUN_NAME must have only letters, digits, '_', '.' and '-', got '$RUN_NAME'"
  case $COMMAND in
    infer | evaluate | compare | train | "train drafter" | "train head") ;;
    *) die "COMMAND must be infer, evaluate, compare, train, 'train drafter' or 'train head', got '$COMMAND'" ;;
  esac
  [[ " ${words[*]:-}" != *" --gin.OUTPUT_DIR="* ]] ||
    die "leave out --gin.OUTPUT_DIR: RUN_NAME sets the directory (now runs/$RUN_NAME)"
  local place
  for place in BUCKET DATA; do
    [[ -z ${!place} || ${!place} == gs://* ]] || die "$place must begin with gs://, got ${!place}"
  done
  exec 3>&1 # a dry run prints here, also from within $(...)
  SCRATCH="$(mktemp -d)"
  ERRORS="$SCRATCH/errors"
  trap 'rm -rf "$SCRATCH"' EXIT
  case ${words[0]:-} in
    create | setup | stop | logs | fetch | delete)
      ((${#words[@]} == 1)) || die "${words[0]} takes no arguments, got ${words[*]:1}"
      "${words[0]}"
      ;;
    run) run "${words[@]:1}" ;;
    *) usage ;;
  esac
}

main "$@"
