#!/bin/sh
# The system programs that tests use: installed on Debian as root, named elsewhere.
set -eu

missing=""
need() { # program, Debian package
    PATH="$PATH:/usr/sbin:/sbin" command -v "$1" >/dev/null 2>&1 || missing="$missing $2"
}
need sshd openssh-server
need ssh openssh-client
need ffmpeg ffmpeg
need espeak-ng espeak-ng
for shell in zsh fish dash busybox tcsh; do
    need "$shell" "$shell" # which users of hosts may have
done
if [ "$(uname -s)" = Linux ]; then
    need ip iproute2
    need nft nftables
    need faketime faketime
    need wireguard-go wireguard-go
    need wg wireguard-tools
    need avahi-daemon avahi-daemon
    need munged munge
    need slurmctld slurmctld
    need slurmd slurmd
    need sbatch slurm-client
    /usr/bin/python3 -c 'import ensurepip' 2>/dev/null || missing="$missing python3 python3-venv"  # the lab's hosts use it
fi
# Ubuntu has it as a snap only, which runs in no container.
[ ! -f /etc/os-release ] || ! grep -q '^ID=debian$' /etc/os-release || need chromium chromium
[ -n "$missing" ] || exit 0

if [ -f /etc/debian_version ] && [ "$(id -u)" = 0 ]; then
    echo "Installing$missing"
    export DEBIAN_FRONTEND=noninteractive
    # shellcheck disable=SC2086
    if ! { apt-get update -qq && apt-get install -y -qq --no-install-recommends $missing >/dev/null; }; then
        echo "Not installed:$missing. Some tests will be skipped by name." >&2
    fi
elif [ "$(uname -s)" = Darwin ]; then
    echo "Some tests will be skipped by name. To run them: brew install ffmpeg espeak-ng fish"
else
    echo "Some tests will be skipped by name. To run them: sudo apt-get install$missing"
fi
