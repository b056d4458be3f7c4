#!/usr/bin/env bash
# A real kube-apiserver, controller-manager, scheduler and etcd for the system tests, built once and kept.
#
# Everything comes from Debian bookworm, checked by apt against its keys, and is unpacked below the cache: nothing is
# installed, and root is not needed. The compiler has about five minutes of two cores to do, and 3 GB of disk while it
# works; 350 MB stay.
#
#   build.sh           build, unless it is there, and print where
#   build.sh --where   print where it would be, and build nothing
#
# KUBERNETES_TEST_SERVERS: the folder to keep it in (~/.cache/tieredckpt/kubernetes). DEBIAN_MIRROR: where from.
# Ends with 3 where this machine cannot build it, and says why.
set -euo pipefail

readonly version=1.20.2 package=1.20.5+really1.20.2-1.1+deb12u1
readonly programs=(kube-apiserver kube-controller-manager kube-scheduler)
readonly place=${KUBERNETES_TEST_SERVERS:-${XDG_CACHE_HOME:-$HOME/.cache}/tieredckpt/kubernetes}/$version
readonly mirror=${DEBIAN_MIRROR:-http://deb.debian.org}
readonly keys=/usr/share/keyrings/debian-archive-keyring.gpg

[[ ${1:-} != --where ]] || { echo "$place"; exit 0; }
[[ ! -e $place/complete ]] || { echo "$place"; exit 0; }

cannot() { echo "kube-apiserver is not built: $*" >&2; exit 3; }
for program in apt-get dpkg-deb dpkg-source patch flock; do
    command -v "$program" >/dev/null || cannot "$program is not installed"
done
[[ -e $keys ]] || cannot "$keys is not there: Debian's packages could not be checked"
[[ $(dpkg --print-architecture) == amd64 ]] || cannot "only tried on amd64"

mkdir -p "$place"
exec 9>"$place/lock"
flock 9  # whoever waited for another's build finds it finished
[[ ! -e $place/complete ]] || { echo "$place"; exit 0; }

readonly work=$place/work
rm -rf "$work"
mkdir -p "$work"/{apt/lists/partial,apt/cache/archives/partial,debs,root,source} "$place/bin"
cat >"$work/apt/sources.list" <<END
deb [signed-by=$keys] $mirror/debian bookworm main
deb-src [signed-by=$keys] $mirror/debian bookworm main
deb-src [signed-by=$keys] $mirror/debian-security bookworm-security main
END
apt=(-qq -o "Dir::State=$work/apt" -o "Dir::State::Lists=$work/apt/lists" -o Dir::State::status=/dev/null
    -o "Dir::Cache=$work/apt/cache" -o "Dir::Etc::SourceList=$work/apt/sources.list" -o Dir::Etc::SourceParts=-
    -o APT::Sandbox::User= -o Acquire::Languages=none -o Acquire::Retries=3)

echo "fetching" >&2
apt-get "${apt[@]}" update >&2 || cannot "Debian's lists could not be fetched"
(cd "$work/debs" && apt-get "${apt[@]}" download golang-1.19-go golang-1.19-src etcd-server \
    golang-github-modern-go-reflect2-dev >&2) || cannot "Debian's packages could not be fetched"
(cd "$work/source" && apt-get "${apt[@]}" --download-only source "kubernetes=$package" >&2) ||
    cannot "the source of Kubernetes could not be fetched"
for deb in "$work"/debs/*.deb; do dpkg-deb -x "$deb" "$work/root"; done

export GOROOT=$work/root/usr/lib/go-1.19 GOPATH=$work/go GOCACHE=$work/gocache
export GO111MODULE=off GOFLAGS='' CGO_ENABLED=0 PATH=$work/root/usr/lib/go-1.19/bin:$PATH
readonly tree=$GOPATH/src/k8s.io/kubernetes
mkdir -p "${tree%/*}"
dpkg-source --no-check -x "$work"/source/*.dsc "$tree" >/dev/null

# The vendored reflect2 reads the runtime's tables as they were before Go 1.18, and dies of it at the first object.
rm -f "$tree"/vendor/github.com/modern-go/reflect2/*.{go,s}
cp "$work"/root/usr/share/gocode/src/github.com/modern-go/reflect2/*.{go,s} \
    "$tree/vendor/github.com/modern-go/reflect2/"

cd "$tree"
echo "generating" >&2
go build -o "$work/openapi-gen" ./vendor/k8s.io/kube-openapi/cmd/openapi-gen
described=$(grep --include='*.go' -rl '+k8s:openapi-gen=' cmd pkg staging/src/k8s.io |
    grep -vE '_test.go|zz_generated|sample-|/testdata/|code-generator|/_examples' | xargs -n1 dirname | sort -u |
    sed -e 's#^staging/src/#k8s.io/kubernetes/vendor/#' -e '/^k8s.io/!s#^#k8s.io/kubernetes/#' | paste -sd,)
mkdir -p pkg/generated/openapi
"$work/openapi-gen" --logtostderr --go-header-file hack/boilerplate/boilerplate.generatego.txt -i "$described" \
    -p k8s.io/kubernetes/pkg/generated/openapi -O zz_generated.openapi -r "$work/violations" \
    --output-base "$GOPATH/src" 2>"$work/openapi-gen.log"

echo "compiling" >&2
name=k8s.io/kubernetes/vendor/k8s.io
flags="-s -w -X $name/component-base/version.gitVersion=v$version -X $name/component-base/version.gitMajor=1
    -X $name/component-base/version.gitMinor=20 -X $name/client-go/pkg/version.gitVersion=v$version"
# Without the cloud providers inside, which is a third of the code and of no use here.
go build -tags providerless,dockerless -ldflags "$flags" -o "$place/bin/" "${programs[@]/#/./cmd/}"
cp "$work/root/usr/bin/etcd" "$place/bin/etcd"

cd /
chmod -R u+w "$work"
rm -rf "$work"
touch "$place/complete"
echo "$place"
