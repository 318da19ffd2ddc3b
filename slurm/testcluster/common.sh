# What up, down, status and node share. Sourced by them; bash.
#
# Each node is a slurmd in network, hostname, process and mount namespaces of its own; slurmctld runs in those of a
# head, whose bridge joins them. So no name, port or firewall of this machine matters, a killed node is a machine
# that lost power, and several clusters can be up at once. Where namespaces can't be made, all daemons share
# this machine's network, on ports of 127.0.0.1.

set -euo pipefail

umask 022
ROOT=/var/lib/megatfm-testcluster # short enough for munge's socket; in /tmp, somebody else could have made it first
PACKAGES=(slurmctld:slurmctld slurmd:slurmd munged:munge mungekey:munge ip:iproute2 nsenter:util-linux unshare:util-linux)

die() {
  echo "testcluster: $*" >&2
  exit 1
}

say() { echo "testcluster: $*" >&2; }

# use NAME: the cluster that all functions below are about.
use() {
  [[ $1 =~ ^[a-z][a-z0-9-]{0,8}$ ]] || die "TESTCLUSTER=$1: use up to 9 lower-case letters, digits and '-'"
  NAME=$1 LAB=$ROOT/$1
  export SLURM_CONF=$LAB/slurm.conf
}

check_root() {
  [ "$(id -u)" = 0 ] || die "run this as root, for example: sudo $0 (jobs can then be submitted by anybody)"
}

check_packages() {
  local pair missing=
  for pair in "${PACKAGES[@]}"; do
    command -v "${pair%:*}" >/dev/null || [[ $missing == *" ${pair#*:}"* ]] || missing+=" ${pair#*:}"
  done
  [ -z "$missing" ] || die "these packages are missing: apt-get install${missing} (or \`make system-deps\`)"
}

# One command at a time. The daemons must not inherit the lock: see `background`.
lock() {
  mkdir -p "$ROOT"
  exec 9>"$ROOT/.lock"
  flock -w 60 9 || die "another testcluster command has been running for a minute (it holds $ROOT/.lock)"
}

# ------------------------------------------------------------------------------------------------- processes

# A pid that we recorded is ours only while the process under it names our folder: zombies and reused pids don't.
ours() { [ -n "$1" ] && grep -qaF "$LAB/" "/proc/$1/cmdline" 2>/dev/null; }

pid_of() { cat "$LAB/run/$1" 2>/dev/null || :; }

running() { ours "$(pid_of "$1")"; }

# background NAME COMMAND…: the pid is written before the command starts, so none is ever unknown.
background() {
  local name=$1
  shift
  setsid bash -c 'echo $$ >"$0"; exec "$@"' "$LAB/run/$name" "$@" >>"$LAB/log/$name.out" 2>&1 </dev/null 9>&- &
  disown # bash would report its death
}

# halt SIGNAL NAME…: all at once; who is still there after ten seconds gets KILL.
halt() {
  local signal=$1 name pid
  shift
  for name; do
    pid=$(pid_of "$name")
    if ours "$pid"; then kill "-$signal" "$pid" || :; fi
  done
  for name; do
    pid=$(pid_of "$name")
    for _ in {1..100}; do
      ours "$pid" || break
      sleep 0.1
    done
    if ours "$pid"; then kill -KILL "$pid" || :; fi
    rm -f "$LAB/run/$name"
  done
}

# ------------------------------------------------------------------------------------------------- the network

netns() { echo "tc-$NAME-$1"; }

node_names() { [ ! -e "$LAB/nodes" ] || cat "$LAB/nodes"; }

# Takes the first free 10.77.K.0/24. The machine itself is .254 of it, the head .1, nodes .11 and up.
make_network() {
  local k node i=10
  for k in {0..255}; do
    NET=10.77.$k
    [ -n "$(ip -4 route show root "$NET.0/24")" ] || break
  done
  echo "$NET" >"$LAB/net"
  ip netns add "$(netns head)" &&
    ip -n "$(netns head)" link add br0 type bridge &&
    ip -n "$(netns head)" addr add "$NET.1/24" dev br0 &&
    ip -n "$(netns head)" link set lo up &&
    ip -n "$(netns head)" link set br0 up &&
    ip link add "tc-$NAME" type veth peer name host netns "$(netns head)" &&
    ip addr add "$NET.254/24" dev "tc-$NAME" &&
    ip link set "tc-$NAME" up &&
    ip -n "$(netns head)" link set host master br0 up || return 1
  for node in $(node_names); do
    i=$((i + 1))
    ip netns add "$(netns "$node")" &&
      ip -n "$(netns head)" link add "$node" type veth peer name eth0 netns "$(netns "$node")" &&
      ip -n "$(netns head)" link set "$node" master br0 up &&
      ip -n "$(netns "$node")" addr add "$NET.$i/24" dev eth0 &&
      ip -n "$(netns "$node")" link set eth0 up &&
      ip -n "$(netns "$node")" link set lo up || return 1
    # torch looks up the names of mapped addresses, for which it would else ask a DNS that no node reaches.
    printf '%s\n' "$NET.$i $node" "::ffff:$NET.$i $node.mapped" >>"$LAB/hosts"
  done
  printf '%s\n' "$NET.1 head" "$NET.254 $(hostname)" "$(</etc/hosts)" >>"$LAB/hosts"
  unshare --uts --mount --pid --fork --mount-proc true
}

# Deleting a namespace deletes the ends that live in it.
remove_network() {
  local node
  for node in $(node_names) head; do
    [ ! -e "/run/netns/$(netns "$node")" ] || ip netns del "$(netns "$node")" || :
  done
  [ ! -e "/sys/class/net/tc-$NAME" ] || ip link del "tc-$NAME" || :
}

# ------------------------------------------------------------------------------------------------- the daemons

# in_namespaces HOST COMMAND: as if on a machine of that name. `ip netns exec` would hide slurmd's cgroups; killing
# the recorded process (unshare) takes everything inside along.
in_namespaces() {
  nsenter_command=(
    nsenter "--net=/run/netns/$(netns "$1")"
    unshare --uts --mount --pid --fork --kill-child=KILL --mount-proc bash -c
    "hostname $1; mount --bind '$LAB/hosts' /etc/hosts; mount -t tmpfs none /dev/shm; $2 & wait"
  )
}

start_head() {
  background munged munged -F --key-file="$LAB/munge.key" --socket="$LAB/munge.sock" \
    --pid-file="$LAB/munged.pid" --log-file="$LAB/log/munged.log" --seed-file="$LAB/munged.seed"
  for _ in {1..50}; do
    [ ! -S "$LAB/munge.sock" ] || break
    sleep 0.1
  done
  if [ -e "$LAB/net" ]; then
    in_namespaces head "slurmctld -D -f '$SLURM_CONF'"
    background slurmctld "${nsenter_command[@]}"
  else
    background slurmctld slurmctld -D -f "$SLURM_CONF"
  fi
}

start_node() {
  if [ -e "$LAB/net" ]; then
    in_namespaces "$1" "slurmd -D -N $1 -f '$SLURM_CONF'"
    background "$1" "${nsenter_command[@]}"
  else
    background "$1" slurmd -D -N "$1" -f "$SLURM_CONF"
  fi
}

# A dead slurmctld makes SLURM's commands wait for minutes.
ask() { timeout 5 "$@" 2>/dev/null || :; }

# ---------------------------------------------------------------------------------------------------- the end

# Takes down what is recorded and nothing else; works on any half of a cluster.
take_down() {
  local nodes
  mapfile -t nodes < <(node_names)
  if [ ! -e "$LAB/net" ] && running slurmctld; then # no namespace ends the jobs together with their node
    ask squeue -h -o %A | xargs -r timeout 5 scancel || :
    for _ in {1..100}; do
      [ -n "$(ask squeue -h)" ] || break
      sleep 0.1
    done
  fi
  if [ -e "$LAB/net" ]; then
    halt KILL "${nodes[@]}" slurmctld # unshare ignores TERM
  else
    halt TERM "${nodes[@]}" slurmctld
  fi
  halt TERM munged
  remove_network
  halt TERM watch
  rm -rf "$LAB"
}

# alive_since PID: when a process started, in clock ticks after boot; nothing when it is gone.
alive_since() { sed 's/.*) //' "/proc/$1/stat" 2>/dev/null | cut -d ' ' -f 20 || :; }

# Clusters that were to live as long as a process that is gone: their watch was killed as well.
sweep() {
  local owner pid since
  for owner in "$ROOT"/*/owner; do
    [ -e "$owner" ] || continue
    read -r pid since <"$owner"
    [ "$(alive_since "$pid")" = "$since" ] || (
      use "$(basename "${owner%/owner}")"
      say "taking down '$NAME', whose owner is gone"
      take_down
    )
  done
}

use "${TESTCLUSTER:-main}"
