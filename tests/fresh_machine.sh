#!/usr/bin/env bash
# The README's two commands on a machine that knows nothing: an empty directory, an empty HOME, a new clone, and no variable of this shell but PATH,
# proxies and the address of the package index.
#   tests/fresh_machine.sh            run them (needs the package index; half an hour on two cores)
#   tests/fresh_machine.sh --show     clone, and let make say what it would do
set -euo pipefail
here=$(cd "$(dirname "$0")/.." && pwd)
empty=$(mktemp -d)
trap 'rm -rf "$empty"' EXIT
mkdir "$empty/home"
git clone --quiet "$here" "$empty/clone"
cd "$empty/clone"
test ! -e .venv || { echo "error: the clone holds a .venv" >&2; exit 1; }

commands=$(sed -n '/^```sh$/,/^```$/p' README.md | grep '^make ' | sed 's/ *#.*//')
while read -r command; do
    clean=(env -i "HOME=$empty/home" "PATH=$PATH")
    for name in PIP_INDEX_URL PIP_CONFIG_FILE PIP_TRUSTED_HOST HTTP_PROXY HTTPS_PROXY http_proxy https_proxy NO_PROXY no_proxy SSL_CERT_FILE REQUESTS_CA_BUNDLE; do
        if [ -n "${!name:-}" ]; then clean+=("$name=${!name}"); fi
    done
    if [ "${1:-}" = --show ]; then
        echo "HOME=$empty/home $command"
        "${clean[@]}" $command --dry-run > /dev/null
    else
        "${clean[@]}" $command
    fi
done <<< "$commands"
if [ -n "$(git status --porcelain)" ]; then echo "changed by the commands:"; git status --short; fi
