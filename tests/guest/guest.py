"""Runs a command as root under another Linux kernel: Debian's, in QEMU, without KVM.

The guest's root is this machine's own `/` by virtio-fs, read-only below an overlay in memory: all
that is installed here is there, and what the guest writes is lost with it. Kernels are
packages of the distribution that this machine has configured, unpacked into `.cache/guest`.

It needs the Debian packages qemu-system-x86, busybox-static and kmod, and root. Its own command
line runs one command: `guest.py [--kernel backports] COMMAND [ARGUMENT...]`.
"""

from __future__ import annotations

import argparse
import contextlib
import lzma
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / ".cache" / "guest"
PACKAGE = "linux-image-cloud-amd64"
STABLE, BACKPORTS = "stable", "backports"
BOOT_MODULES = ("virtio_pci", "virtio_console", "virtiofs", "overlay", "virtio_rng")
VIRTIOFSD = ("/usr/libexec/virtiofsd", "/usr/lib/qemu/virtiofsd")
# QEMU 7.2 garbles flags after the cmpxchg16b that newer kernels use.
CPU = "max,cx16=off"
FILES = "root.sock"
STATUS = "guest-status "

INIT = """\
#!/bin/sh
export PATH=/bin
mount -t proc proc /proc; mount -t sysfs sys /sys; mount -t devtmpfs dev /dev
while read -r module; do insmod "/mod/$module"; done < /mod/order
for word in $(cat /proc/cmdline); do
  case $word in guest_job=*) job=${word#*=};; guest_modules=*) modules=${word#*=};; esac
done
mount -t virtiofs -o ro root /ro || exit 1
mount -t tmpfs -o mode=755,size=80% tmpfs /rw; mkdir /rw/upper /rw/work
mount -t overlay -o lowerdir=/ro,upperdir=/rw/upper,workdir=/rw/work overlay /new || exit 1
here=/new/usr/lib/modules/${modules##*/}
mkdir -p "$here/kernel"; cp /ro"$modules"/modules.* "$here/"
mount --bind "/ro$modules/kernel" "$here/kernel"
for folder in proc sys dev; do mount --move /$folder /new/$folder; done
exec switch_root /new /bin/sh "$job"
"""

# What a pod sees: no tracefs, no debugfs.
JOB = """\
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root
for port in /sys/class/virtio-ports/*; do
  read -r name < "$port/name"; [ "$name" = out ] && out=/dev/${{port##*/}}
done
mkdir -p /dev/pts /dev/shm
mount -t devpts devpts /dev/pts; mount -t tmpfs tmpfs /dev/shm; mount -t tmpfs tmpfs /run
mount -t cgroup2 cgroup2 /sys/fs/cgroup; mount -t securityfs securityfs /sys/kernel/security
mkdir -p /run/netns; ip link set lo up; echo guest > /proc/sys/kernel/hostname
cd {folder} || exit
export PYTHONDONTWRITEBYTECODE=1
exec > "$out" 2>&1 < /dev/null
{command}
echo "{status}$?"
sync; echo o > /proc/sysrq-trigger; sleep 60
"""


class GuestError(Exception):
    """No guest can run here, or one broke; the text says why and what would help."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """An unpacked kernel: its release, boot image, modules and initramfs."""

    release: str
    image: Path
    modules: Path
    initramfs: Path


@dataclass(frozen=True, slots=True)
class Result:
    """How a command in a guest ended; `output` holds both of its streams."""

    status: int
    output: str
    seconds: float


def prepare(which: str = STABLE) -> Kernel:
    """Makes a kernel ready, from the cache where it is there.

    Args:
        which: `stable`, or `backports` for a newer one.

    Raises:
        GuestError: something is missing here.
    """
    _check_tools()
    base = CACHE / which
    ready = base / "ready"
    if not ready.exists():
        shutil.rmtree(base, ignore_errors=True)
        base.mkdir(parents=True)
        for package in _download(which, base):
            _unpack(package, base / "image")
        _boot_files(base)
        ready.touch()
    image = next((base / "image" / "boot").glob("vmlinuz-*"))
    release = image.name.removeprefix("vmlinuz-")
    return Kernel(release, image, base / "lib" / "modules" / release, base / "initramfs")


def run(
    kernel: Kernel,
    command: list[str],
    *,
    timeout: float = 240,
    memory_mib: int = 2048,
    parameters: str = "",
) -> Result:
    """Boots, runs one command in this project's folder, powers off.

    Raises:
        GuestError: the guest died or did not end in time.
    """
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        work = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=CACHE, prefix="job-")))
        job = work / "job.sh"
        job.write_text(
            JOB.format(folder=shlex.quote(str(ROOT)), command=shlex.join(command), status=STATUS)
        )
        files = work / FILES
        log = stack.enter_context((work / "log").open("wb"))
        server = subprocess.Popen(
            _file_server(files), stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
        stack.callback(_end, server)
        _wait_for(files, server, work / "log")
        guest = subprocess.Popen(
            _qemu(kernel, work, memory_mib=memory_mib, parameters=parameters),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
        stack.callback(_end, guest)
        try:
            guest.wait(timeout)
        except subprocess.TimeoutExpired as error:
            raise GuestError(f"no end after {timeout:g} s\n{_said(work)}") from error
        output, mark, status = (work / "out").read_text(errors="replace").rpartition(STATUS)
        if not mark:
            raise GuestError(f"the guest ended without a status\n{_said(work)}")
        return Result(int(status), output.replace("\r\n", "\n"), time.monotonic() - began)


def _check_tools() -> None:
    if os.geteuid() != 0:
        raise GuestError("guests need root (virtiofsd changes its root)")
    if platform.machine() != "x86_64":
        raise GuestError("guests are x86_64 only")
    tools = ("qemu-system-x86_64", "busybox", "depmod", "modprobe", "apt-get", "dpkg-deb")
    missing = [tool for tool in tools if shutil.which(tool) is None]
    if not any(os.access(path, os.X_OK) for path in VIRTIOFSD):
        missing.append("virtiofsd")
    if missing:
        raise GuestError(
            f"missing: {', '.join(missing)} (Debian: qemu-system-x86 busybox-static kmod)"
        )


def _download(which: str, base: Path) -> list[Path]:
    """Fetches the kernel's packages from the mirror that this machine's apt uses."""
    site, codename = _mirror()
    suite = codename if which == STABLE else f"{codename}-{which}"
    sources = base / "sources.list"
    sources.write_text(f"deb {site} {suite} main\n")
    for folder in ("lists/partial", "archives/partial"):
        (base / "apt" / folder).mkdir(parents=True)
    options = [
        f"Dir::Etc::SourceList={sources}",
        "Dir::Etc::SourceParts=/dev/null",
        f"Dir::State::Lists={base}/apt/lists",
        f"Dir::Cache={base}/apt",
        "APT::Sandbox::User=root",
        "Acquire::Languages=none",
    ]
    flags = [word for option in options for word in ("-o", option)]
    _call(["apt-get", *flags, "update", "-qq"])
    names = _depends(PACKAGE, "linux-image-", flags)
    if not names:
        raise GuestError(f"{suite} has no {PACKAGE}")
    # Since Linux 7 an image is several packages.
    for part in ("linux-binary-", "linux-modules-"):
        names += _depends(names[0], part, flags)
    _call(["apt-get", *flags, "download", "-qq", *names], cwd=base)
    shutil.rmtree(base / "apt")
    return list(base.glob("*.deb"))


def _depends(package: str, prefix: str, flags: list[str]) -> list[str]:
    """The first real package of such a name that a package depends on."""
    words = _call(["apt-cache", *flags, "depends", package]).split()
    return [word for word in words if word.startswith(prefix) and word != package][:1]


def _mirror() -> tuple[str, str]:
    release = dict(
        line.split("=", 1)
        for line in Path("/etc/os-release").read_text().split("\n")
        if "=" in line
    )
    codename = release.get("VERSION_CODENAME", "").strip('"')
    targets = _call(
        ["apt-get", "indextargets", "--format", "$(SITE) $(CODENAME)", "Created-By: Packages"]
    )
    for line in targets.splitlines():
        site, _, name = line.rpartition(" ")
        if name == codename:
            return site, codename
    raise GuestError(f"apt has no source for {codename or 'this system'}")


def _unpack(package: Path, target: Path) -> None:
    _call(["dpkg-deb", "-x", str(package), str(target)])
    package.unlink()


def _boot_files(base: Path) -> None:
    # Packages of Debian 12 use /lib, later ones /usr/lib.
    modules = next(
        path
        for prefix in ("lib", "usr/lib")
        for path in (base / "image" / prefix / "modules").glob("*")
    )
    release = modules.name
    if (modules / "vmlinuz").exists():  # since Linux 7
        (base / "image" / "boot").mkdir(exist_ok=True)
        (modules / "vmlinuz").rename(base / "image" / "boot" / f"vmlinuz-{release}")
    (base / "lib" / "modules").mkdir(parents=True)
    modules.rename(base / "lib" / "modules" / release)
    _call(["depmod", "-b", str(base), release])
    names: list[str] = []
    folders = ("bin", "mod", "proc", "sys", "dev", "ro", "rw", "new")
    tree: dict[str, tuple[int, bytes]] = dict.fromkeys(folders, (0o040755, b""))
    for module in BOOT_MODULES:
        wanted = subprocess.run(
            ["modprobe", "-d", str(base), "-S", release, "-D", module],
            check=False,  # built in: nothing to insert
            capture_output=True,
            text=True,
        ).stdout
        for line in wanted.splitlines():
            verb, _, place = line.partition(" ")
            name = Path(place.strip()).name.partition(".ko")[0] + ".ko"
            if verb == "insmod" and name not in names:
                names.append(name)
                tree[f"mod/{name}"] = (0o100644, _module(Path(place.strip())))
    tree["mod/order"] = (0o100644, "".join(f"{name}\n" for name in names).encode())
    busybox = shutil.which("busybox")
    assert busybox
    tree["bin/busybox"] = (0o100755, Path(busybox).read_bytes())
    for name in ("sh", "cat", "cp", "insmod", "mkdir", "mount", "switch_root"):
        tree[f"bin/{name}"] = (0o120777, b"busybox")
    tree["init"] = (0o100755, INIT.encode())
    (base / "initramfs").write_bytes(_cpio(tree))


def _module(path: Path) -> bytes:
    content = path.read_bytes()
    return lzma.decompress(content) if path.suffix == ".xz" else content


def _cpio(tree: dict[str, tuple[int, bytes]]) -> bytes:
    """An initramfs archive, see buffer-format.rst in the kernel's documentation."""
    archive = bytearray()
    for number, (name, (mode, content)) in enumerate(
        {**tree, "TRAILER!!!": (0, b"")}.items(), start=1
    ):
        fields = (number, mode, 0, 0, 1, 0, len(content), 0, 0, 0, 0, len(name) + 1, 0)
        archive += b"070701" + "".join(f"{field:08X}" for field in fields).encode()
        archive += name.encode() + b"\0"
        archive += bytes(-len(archive) % 4) + content
        archive += bytes(-len(archive) % 4)
    return bytes(archive)


def _file_server(socket: Path) -> list[str]:
    path = next(path for path in VIRTIOFSD if os.access(path, os.X_OK))
    if "qemu" in path:
        options = "source=/,sandbox=chroot,cache=always,no_posix_lock"
        return [path, f"--socket-path={socket}", "-o", options, "-f"]
    # An overlay cannot stand on what the guest knows for another file system, as /proc is here.
    shared = ["--shared-dir", "/", "--sandbox", "chroot", "--cache", "always"]
    shared.append("--no-announce-submounts")
    return [path, f"--socket-path={socket}", *shared]


def _qemu(kernel: Kernel, work: Path, *, memory_mib: int, parameters: str) -> list[str]:
    words = (
        "console=ttyS0 quiet loglevel=4 mitigations=off nokaslr tsc=reliable no_timer_check "
        "panic=-1 oops=panic audit=0 apparmor=0 nowatchdog random.trust_cpu=on "
        "cryptomgr.notests rcupdate.rcu_expedited=1 net.ifnames=0 "
        f"guest_job={work}/job.sh guest_modules={kernel.modules} {parameters}"
    )
    return [
        *("qemu-system-x86_64", "-nodefaults", "-no-user-config", "-nographic", "-no-reboot"),
        *("-M", "q35,memory-backend=ram,vmport=off,smm=off,hpet=off,usb=off"),
        *("-accel", "tcg,thread=multi", "-cpu", CPU, "-smp", "2", "-m", str(memory_mib)),
        *("-object", f"memory-backend-memfd,id=ram,size={memory_mib}M,share=on"),
        *("-kernel", str(kernel.image), "-initrd", str(kernel.initramfs), "-append", words),
        *("-chardev", f"file,id=console,path={work}/console", "-serial", "chardev:console"),
        *("-chardev", f"socket,id=files,path={work}/{FILES}"),
        *("-device", "vhost-user-fs-pci,chardev=files,tag=root,queue-size=512"),
        *("-device", "virtio-serial-pci", "-device", "virtio-rng-pci"),
        *("-chardev", f"file,id=out,path={work}/out"),
        *("-device", "virtserialport,chardev=out,name=out"),
    ]


def _wait_for(socket: Path, server: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 10
    while not socket.exists():
        if server.poll() is not None or time.monotonic() > deadline:
            raise GuestError(f"virtiofsd does not start: {log.read_text(errors='replace')}")
        time.sleep(0.02)


def _said(work: Path) -> str:
    parts = []
    for name in ("log", "console", "out"):
        with contextlib.suppress(OSError):
            parts.append(f"{name}: {(work / name).read_text(errors='replace')[-2000:]}")
    return "\n".join(parts)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def _call(command: list[str], *, cwd: Path | None = None) -> str:
    done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=cwd)
    if done.returncode:
        raise GuestError(f"{' '.join(command[:2])}: {done.stderr.strip()[-500:]}")
    return done.stdout


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kernel", choices=(STABLE, BACKPORTS), default=STABLE)
    parser.add_argument("--parameters", default="", help="more kernel parameters")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    arguments = parser.parse_args()
    if not arguments.command:
        parser.error("which command?")
    try:
        result = run(prepare(arguments.kernel), arguments.command, parameters=arguments.parameters)
    except GuestError as error:
        print(f"guest: {error}", file=sys.stderr)
        return 125
    print(result.output, end="")
    return result.status


if __name__ == "__main__":
    sys.exit(main())
