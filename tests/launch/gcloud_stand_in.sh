#!/usr/bin/env bash
# A `gcloud` that keeps a TPU in a directory, records each call, and fails as it is told. In bash,
# for it is called some hundred times.
#
# The directory, $STAND_IN, holds `calls`, what exists (`node` and `request`: one state a line, of
# which each look takes one; `workers`, `kind`, `dead`, `mute`), `faults` (a directory for each thing that
# goes wrong), each worker's home directory (`home-N`) and `bucket` (gs://bucket). Commands over ssh
# run here, in the worker's home. Flags that the real commands do not have are refused.
set -euo pipefail
cd "$STAND_IN"

fail() {
  printf 'ERROR: (gcloud) %s\n' "$1" >&2
  exit "${2:-1}"
}

# As of gcloud 528 (`gcloud COMMAND --help`).
known_flags() {
  local request="zone quiet project node-id accelerator-type runtime-version spot valid-until-duration"
  case $1 in
    "compute tpus tpu-vm create") printf 'zone quiet project accelerator-type version spot network' ;;
    "compute tpus tpu-vm delete") printf 'zone quiet project' ;;
    "compute tpus tpu-vm describe" | "compute tpus queued-resources describe")
      printf 'zone quiet project format'
      ;;
    "compute tpus tpu-vm ssh") printf 'zone quiet project worker internal-ip command' ;;
    "compute tpus tpu-vm scp") printf 'zone quiet project worker internal-ip recurse' ;;
    "compute tpus queued-resources create") printf '%s' "$request" ;;
    "alpha compute tpus queued-resources create")
      printf '%s provisioning-model max-run-duration' "$request"
      ;;
    "compute tpus queued-resources delete") printf 'zone quiet project force' ;;
    "storage ls" | "storage cp" | "storage cat") printf 'quiet' ;;
    "storage rsync") printf 'quiet recursive' ;;
    *) fail "Invalid choice: $1" 2 ;;
  esac
}

# Does the next thing that was to go wrong with this command; it may end the program.
fault() {
  local path there text
  for path in faults/*/; do
    [[ -d $path ]] || continue
    # shellcheck disable=SC2053 # a pattern
    [[ $1 == $(<"$path/match") ]] || continue
    if [[ -f $path/once_there ]]; then
      while read -r text there; do
        grep -q "$text" "$there" 2>/dev/null || continue 2
      done <"$path/once_there"
    fi
    for there in node request dead mute; do
      [[ ! -f $path/$there ]] || cp "$path/$there" "$there"
    done
    [[ ! -f $path/forget ]] || rm -f "$(<"$path/forget")"
    [[ ! -f $path/wipe ]] || wipe
    if [[ -f $path/stderr ]]; then
      there="$(<"$path/stderr")"
      [[ -f $path/always ]] || rm -r "$path"
      fail "$there"
    fi
    [[ -f $path/always ]] || rm -r "$path"
    return 0
  done
}

# The machine is taken away: its processes and its disk.
wipe() {
  local pid
  for pid in home-*/specjax/runs/*.pid; do
    [[ ! -f $pid ]] || kill -KILL -- "-$(<"$pid")" 2>/dev/null || true
  done
  rm -rf home-*
}

make_node() {
  local worker
  printf 'READY\n' >node
  for ((worker = 0; worker < $(<workers); worker++)); do mkdir -p "home-$worker"; done
}

describe() {
  local states=()
  [[ -f $1 ]] || fail "NOT_FOUND: Resource 'projects/p/locations/z' was not found"
  mapfile -t states <"$1"
  if [[ $2 == "value(state)" || $2 == "value(state.state)" ]]; then
    printf '%s\n' "${states[0]}"
    ((${#states[@]} == 1)) || printf '%s\n' "${states[@]:1}" >"$1"
    [[ $1 != request || ${states[0]} != ACTIVE || -f node ]] || make_node
  elif [[ $2 == "value(networkEndpoints.len())" ]]; then
    cat workers
  elif [[ $2 == "value(acceleratorType)" ]]; then
    cat kind
  else
    fail "$2: no such field"
  fi
}

chosen() {
  [[ -f node && $(<node) == READY ]] || fail "TPU is not in state READY"
  if [[ ${flags[worker]} == all ]]; then seq 0 $(($(<workers) - 1)); else printf '%s' "${flags[worker]}"; fi
}

ssh_to() {
  local worker status=0 failed=0 pids=()
  for worker in $(chosen); do
    if grep -qx "$worker" dead 2>/dev/null; then
      printf 'ssh: connect to worker %s: Connection timed out\n' "$worker" >&2
      failed=255
      continue
    fi
    ! grep -qx "$worker" mute 2>/dev/null || continue # nothing is run, and nothing told
    (cd "home-$worker" && HOME="$PWD" HOSTNAME="t1v-n-0123abcd-w-$worker" bash -c "${flags[command]}") &
    pids+=($!)
  done
  for worker in "${pids[@]}"; do
    status=0
    wait "$worker" || status=$?
    ((status == 0)) || failed=$status
  done
  exit "$failed"
}

# put SOURCE TARGET: such that no reader sees half a file.
# As in a bucket each file is there as a whole or not at all, whenever the copy is killed.
put() {
  local file
  if [[ -d $1 ]]; then
    mkdir -p "$2"
    while IFS= read -r file; do put "$1/$file" "$2/$file"; done < <(find "$1" -type f -printf '%P\n')
  else
    mkdir -p "$(dirname "$2")"
    cp "$1" "$2.part.$$"
    mv "$2.part.$$" "$2"
  fi
}

scp_to() {
  local worker found
  for worker in $(chosen); do
    ! grep -qx "$worker" dead 2>/dev/null || fail "ssh: connect to worker $worker: timed out" 255
    if [[ ${words[0]} == *:* ]]; then
      for found in "home-$worker"/${words[0]#*:}; do put "$found" "${words[1]}/$(basename "$found")"; done
    else
      put "${words[0]}" "home-$worker/${words[1]#*:}"
    fi
  done
}

storage() {
  local paths=() word source target
  for word in "${words[@]}"; do
    if [[ $word == gs://* ]]; then paths+=("$STAND_IN/${word#gs://}"); else paths+=("$word"); fi
  done
  if [[ $1 == "storage ls" ]]; then
    [[ -e ${paths[0]} ]] || fail "One or more URLs matched no objects."
    return
  fi
  if [[ $1 == "storage cat" ]]; then
    [[ -e ${paths[0]} ]] || fail "The following URLs matched no objects or files."
    cat "${paths[0]}"
    return
  fi
  target="${paths[-1]}"
  for source in "${paths[@]:0:${#paths[@]}-1}"; do
    [[ -e $source ]] || fail "Did not find existing container at: $source"
    if [[ $1 == "storage cp" && $target == */ ]]; then
      put "$source" "$target$(basename "$source")"
    else
      put "$source" "$target"
    fi
  done
}

printf '%s\n' "$*" >>calls
command=""
words=()
declare -A flags=()
case "$1 ${2:-}" in
  "storage "*) length=2 ;;
  "alpha "*) length=5 ;;
  *) length=4 ;;
esac
command="${*:1:length}"
line="$*"
known=" $(known_flags "$command") "
cd "$OLDPWD" # where relative paths of the caller lead
for word in "${@:length+1}"; do
  if [[ $word == --* ]]; then
    name="${word%%=*}"
    [[ $known == *" ${name#--} "* ]] || fail "unrecognized arguments: $name" 2
    flags[${name#--}]="${word#*=}"
  elif [[ $word == /* || $word == gs://* || $word == *:* || ! -e $word ]]; then
    words+=("$word")
  else
    words+=("$PWD/$word")
  fi
done
cd "$STAND_IN"
fault "$line"
thing=node
[[ $command != *queued-resources* ]] || thing=request
case $command in
  storage*) storage "$command" ;;
  *describe) describe "$thing" "${flags[format]}" ;;
  *create)
    [[ ! -f $thing ]] || fail "ALREADY_EXISTS: Resource 'projects/p/locations/z' already exists"
    printf '%s\n' "${flags[accelerator-type]}" >kind
    if [[ $thing == node ]]; then make_node; else printf 'WAITING_FOR_RESOURCES\nACTIVE\n' >request; fi
    ;;
  *delete)
    [[ -f $thing ]] || fail "NOT_FOUND"
    [[ ! -f undeletable ]] || fail "INTERNAL: try again"
    wipe
    rm -f node "$thing"
    ;;
  *ssh) ssh_to ;;
  *scp) scp_to ;;
esac
