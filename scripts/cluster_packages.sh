#!/bin/sh
# Installs the Debian packages of tests/cluster if this is root and apt works. Otherwise the tests that need them are skipped with a reason.
set -u
missing=""
for pair in slurmctld:slurm-wlm munged:munge ip:iproute2; do
  command -v "${pair%%:*}" >/dev/null 2>&1 || missing="$missing ${pair##*:}"
done
[ -n "$missing" ] || exit 0
if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null 2>&1; then
  echo "not installed:$missing (needs root and apt); their tests are skipped"
  exit 0
fi
export DEBIAN_FRONTEND=noninteractive
# shellcheck disable=SC2086  # a list of packages
apt-get update -qq && apt-get install -y -qq --no-install-recommends $missing >/dev/null \
  || echo "apt could not install:$missing; their tests are skipped"
exit 0
