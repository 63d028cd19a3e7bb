# Shell functions that the scripts share; sourced, not run.
# shellcheck shell=bash

# Exported by some, it sends `cd` elsewhere and has it print where.
unset CDPATH
# The checkout, whatever the current directory; without links in it, so that a build is the same one by whichever way it is reached.
headwater_root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
# Where install-deps puts PyTorch if the distribution has no package of it.
headwater_venv=$headwater_root/build/venv
# The packages of libraries that the project is compiled with.
headwater_libraries=(
  libabsl-dev libbenchmark-dev libc-ares-dev libgmock-dev libgrpc++-dev libgtest-dev libmicrohttpd-dev libopenblas-dev libprotobuf-dev
  libre2-dev libssl-dev libxxhash-dev nlohmann-json3-dev prometheus-cpp-dev zlib1g-dev
)
export headwater_root headwater_venv headwater_libraries

say() { printf '%s\n' "$*" >&2; }

die() {
  say "$(basename "$0"): $*"
  exit 1
}

# find_python MODULE...: prints the first interpreter, of Python 3.11 or newer, that imports numpy, cffi, google.protobuf and MODULE...:
# HEADWATER_PYTHON alone if it is set, else `python3` on the PATH, else the distribution's, else that of the environment that install-deps
# made. Answers 1 when there is none.
find_python() {
  local candidates=(python3 /usr/bin/python3 "$headwater_venv/bin/python3") candidate path
  if [[ -n ${HEADWATER_PYTHON:-} ]]; then candidates=("$HEADWATER_PYTHON"); fi
  for candidate in "${candidates[@]}"; do
    path=$(command -v "$candidate") || continue
    # A real import, not a look at the folders: a module that is there but cannot be loaded does not help.
    if "$path" -c 'import importlib, sys
if sys.version_info < (3, 11): sys.exit(1)
for name in sys.argv[1:]: importlib.import_module(name)' numpy cffi google.protobuf "$@" >/dev/null 2>&1; then
      printf '%s\n' "$path"
      return 0
    fi
  done
  return 1
}

# control_group_limits ROOT GROUPS: prints how many cores and how many bytes of memory the control groups that the file GROUPS names, and
# those above them, allow: a container's limits, which nproc and /proc/meminfo do not tell. ROOT is where they are mounted. What has no
# limit is a number out of reach.
control_group_limits() {
  local root=$1 groups=$2 cores=65536 bytes=$((1 << 60)) controllers path folder quota period limit
  if [[ -r $groups ]]; then
    while IFS=: read -r _ controllers path; do
      case ,$controllers, in
        ,,) folder=$root ;; # version 2
        *,memory,*) folder=$root/memory ;;
        *,cpu,*) folder=$root/cpu ;;
        *) continue ;;
      esac
      path=${path%/}
      while true; do
        quota=max period=100000 limit=max
        if [[ -r $folder$path/cpu.max ]]; then read -r quota period <"$folder$path/cpu.max"; fi
        if [[ -r $folder$path/cpu.cfs_quota_us ]]; then read -r quota <"$folder$path/cpu.cfs_quota_us"; fi
        if [[ -r $folder$path/cpu.cfs_period_us ]]; then read -r period <"$folder$path/cpu.cfs_period_us"; fi
        if [[ -r $folder$path/memory.max ]]; then read -r limit <"$folder$path/memory.max"; fi
        if [[ -r $folder$path/memory.limit_in_bytes ]]; then read -r limit <"$folder$path/memory.limit_in_bytes"; fi
        # "max", and in version 1 a quota of -1, are none. A part of a core counts as one.
        if [[ $quota =~ ^[1-9][0-9]*$ ]] && (((quota + period - 1) / period < cores)); then cores=$(((quota + period - 1) / period)); fi
        if [[ $limit =~ ^[0-9]+$ ]] && ((limit < bytes)); then bytes=$limit; fi
        if [[ -z $path ]]; then break; fi
        path=${path%/*}
      done
    done <"$groups"
  fi
  echo "$cores $bytes"
}

# build_jobs: how many compilers to run at once: a core each, and at least 2 GB of memory for each.
build_jobs() {
  local cores bytes available by_memory
  read -r cores bytes < <(control_group_limits /sys/fs/cgroup /proc/self/cgroup)
  if (($(nproc) < cores)); then cores=$(nproc); fi
  available=$((1024 * $(awk '/^MemAvailable:/ { print $2 }' /proc/meminfo)))
  if ((available < bytes)); then bytes=$available; fi
  by_memory=$((bytes / 2000000000))
  if ((by_memory < 1)); then by_memory=1; fi
  echo $((cores < by_memory ? cores : by_memory))
}

# configure PRESET OPTION...: makes build/PRESET ready, with the options if it is new; one that is there stays as it is configured, so that
# what it has built still serves.
configure() {
  local preset=$1
  shift
  if [[ -e $headwater_root/build/$preset/CMakeCache.txt ]]; then set --; fi
  cmake --preset "$preset" "$@"
}

# check_build_folder PRESET: ends the script if what was built there was built for another path, as when the checkout has been moved: CMake
# refuses such a folder, in words that do not tell what to do.
check_build_folder() {
  local folder=$headwater_root/build/$1 home
  if [[ ! -r $folder/CMakeCache.txt ]]; then return 0; fi
  home=$(sed -n 's/^CMAKE_HOME_DIRECTORY:INTERNAL=//p' "$folder/CMakeCache.txt")
  if [[ -n $home && ! $home -ef $headwater_root ]]; then die "build/$1 was made for a checkout in $home; remove it: rm -r '$folder'"; fi
}
