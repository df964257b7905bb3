"""Takes out of an answer whatever tells who its owner is: what is judged and written has passed through here."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

# Names of machines and users that tell nothing, and that stand in answers as words of their own.
ORDINARY = """
localhost root admin user mac macos apple python terminal linux darwin none ipv4 ipv6 private public shared link local
loopback multicast any mask path key home temporary system disk external removed ok warning problem skipped error cpu
mps cuda arm64 x86_64 eperm esrch included excluded
"""
PUBLIC = set(ORDINARY.split())
INSTALLER = "another installer of Python"
# Of a path only its kind stays. The first that fits.
KINDS = [
    (r"/opt/homebrew/opt/.*", "Homebrew, opt"),
    (r"/opt/homebrew/Cellar/.*", "Homebrew, Cellar"),
    (r"/opt/homebrew(/.*)?", "Homebrew"),
    (r"/usr/local(/.*)?", "usr local"),
    (r"/Library/Frameworks/Python\.framework(/.*)?", "python.org"),
    (r"/(Library/Developer/CommandLineTools|Applications/Xcode[\w.-]*)(/.*)?", "Apple's developer tools"),
    (r".*/\.?(uv|pyenv|conda|miniconda3?|anaconda3?|miniforge3?|mambaforge)/.*", INSTALLER),
    (r"/(usr|bin|sbin|System|etc|lib|lib64)(/.*)?", "system"),
    (r"/Volumes(/.*)?", "external disk"),
    (r"(~[^/]*|/Users/[^/]*|/home/[^/]*|/root)(/.*)?", "home"),
    (r"/(private/)?(tmp|var)(/.*)?", "temporary"),
]
# A blank belongs to a path if a slash follows later in the same piece of text.
PATH = re.compile(r"(?<![\w./<~])(?:~[\w.-]*)?/(?=[^\s/])(?:[^\s'\"`,;:|<>()]|[ ](?=[^'\"`,;:|<>()\n]*/))*")
QUOTED_PATH = re.compile(r"(?P<quote>['\"`])(?:~[\w.-]*)?/[^'\"`\n]*(?P=quote)")
EXECUTABLE = re.compile(r"^(Executable=)([/~].*)$", re.MULTILINE)  # of codesign: blanks and all
KEYS = [
    re.compile(r"-----BEGIN [^-]+-----.*?(-----END [^-]+-----|\Z)", re.DOTALL),
    re.compile(r"\b(ssh-|ecdsa-|sk-)[\w@.-]+ AAAA[^\n]*"),
    re.compile(r"\b(SHA256|MD5):[\w+/=:]{16,}"),
]
LONG_KEY = re.compile(r"(?<![\w+/])[\w+/]{40,}={0,2}")
LINES = re.compile(r"^.*\b(Serial Number|Hardware UUID|Provisioning UDID|User Defined Name|SSID)\b.*$", re.I | re.M)
UUID = re.compile(r"\b[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}\b", re.IGNORECASE)
E_MAIL = re.compile(r"[\w.+-]+@[\w-]+(\.[\w-]+)+")
# "Authority=Apple Development: NAME (TEAM)", "Hardware Port: NAME's iPhone", programs such as a VPN's
OWN = re.compile(r"^(Authority=[^:\n]+|TeamIdentifier(?==)|Hardware Port(?=:.*['’]))[:=].*$", re.MULTILINE)
KEPT_AWAKE = re.compile(r"(?<=kept awake right now) by [^)\n]*")
OTHER_MASTER = re.compile(r"\S+(?=, another master,)")
HARDWARE = re.compile(r"(?<![\w:-])[0-9a-f]{1,2}([:-])(?:[0-9a-f]{1,2}\1){4,}[0-9a-f]{1,2}(?!\w)", re.I)
INTERFACE = re.compile(r"\b((?:en|wl)x)[0-9a-f]{12}\b")  # Linux: named after its hardware address
IPV6 = re.compile(r"(?<![\w:.])(?=[\da-f:]*:)[\da-f:]*:[\da-f:.]*[\da-f:](?:%[\w.-]+)?(?!\w)", re.IGNORECASE)
IPV4 = re.compile(r"(?<![\d.])\d{1,3}(?:\.\d{1,3}){3}(?!\d|\.\d)")


class Sanitizer:
    """Turns hosts into A, B, C; users, folders and other names into words; addresses and paths into their kind."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}
        self._folders: dict[str, str] = {}
        self._pattern: re.Pattern[str] | None = None

    def learn(self, names: Iterable[str], as_word: str) -> None:
        """Learn a host's names and addresses, or a user's. The first part of a name with dots is enough."""
        for name in names:
            kind = kind_of_address(name)
            for part in (name,) if kind else (name, name.split(".")[0]):
                if len(part.strip()) > 1 and part.lower() not in PUBLIC:
                    self._names.setdefault(part.lower(), f"{as_word} ({kind})" if kind else as_word)
        known = sorted(self._names, key=len, reverse=True)
        words = "|".join(map(re.escape, known))  # and what follows after a dot is a domain of the owner's
        if known:
            self._pattern = re.compile(rf"(?<![a-z0-9])({words})(?:\.[a-z0-9-]+)*(?![a-z0-9])", re.IGNORECASE)

    def learn_folders(self, folders: Iterable[str], kind: str) -> None:
        for folder in folders:
            if len(folder.rstrip("/")) > 1:
                self._folders.setdefault(folder.rstrip("/"), kind)

    def clean(self, value: Any) -> Any:
        """Clean every text in a value.

        Keys of objects are words of ours or names of interfaces: a user may be called `answer`, so names stay there.
        """
        match value:
            case str():
                return self.text(value)
            case Mapping():
                return {_without_addresses(_without_keys(str(key))): self.clean(item) for key, item in value.items()}
            case list() | tuple():
                return [self.clean(item) for item in value]
        return value

    def text(self, text: str) -> str:
        text = EXECUTABLE.sub(lambda found: found[1] + self._kind_of_path(found[2]), _without_keys(text))
        text = QUOTED_PATH.sub(lambda found: self._kind_of_path(found[0][1:-1]), text)
        for folder in sorted(self._folders, key=len, reverse=True):  # also those with blanks and commas
            rest = r"(?![\w-])(?:[^\s'\"`,;:|<>()]|[ ](?=[^'\"`,;:|<>()\n]*/))*"
            text = re.sub(rf"(?<![\w/]){re.escape(folder)}{rest}", lambda found: self._kind_of_path(found[0]), text)
        text = PATH.sub(lambda found: self._kind_of_path(found[0]), text)
        text = LONG_KEY.sub("<key>", text)  # a path may be as long as a key
        if self._pattern:
            text = self._pattern.sub(lambda found: self._names[found[1].lower()], text)
        return _without_addresses(E_MAIL.sub("<e-mail>", text))

    def _kind_of_path(self, path: str) -> str:
        own = [kind for folder, kind in self._folders.items() if (path + "/").startswith(folder + "/")]
        kinds = [kind for pattern, kind in KINDS if re.fullmatch(pattern, path)]
        kind = INSTALLER if INSTALLER in kinds else next(iter([*own, *kinds]), "")
        return f"<path: {kind}>" if kind else "<path>"


def _without_keys(text: str) -> str:
    text = OTHER_MASTER.sub("one", text)
    text = KEPT_AWAKE.sub("", OWN.sub(r"\1", UUID.sub("<UUID>", LINES.sub("<removed>", text))))
    for pattern in KEYS:
        text = pattern.sub("<key>", text)
    return text


def _without_addresses(text: str) -> str:
    text = INTERFACE.sub(r"\1", HARDWARE.sub("<hardware address>", text))
    return IPV4.sub(_address, IPV6.sub(_address, text))


def _address(found: re.Match[str]) -> str:
    text = found[0].partition("%")[0]
    for candidate in (text, text.rstrip(":."), text.rpartition(":")[0]):  # a port may follow
        if kind := kind_of_address(candidate):
            return kind + text[len(candidate) :]
    return found[0]


SHARED = ipaddress.ip_network("100.64.0.0/10")  # of providers, and of VPNs such as Tailscale
TESTS: list[tuple[Callable[[Any], bool], str]] = [
    (lambda address: address.is_unspecified, "any"),
    (lambda address: address.is_loopback, "loopback"),
    (lambda address: address.is_link_local, "link-local"),
    (lambda address: address.is_multicast, "multicast"),
    (lambda address: str(address).startswith("255."), "mask"),
    (lambda address: address.is_private, "private"),
    (lambda address: address.version == 4 and address in SHARED, "shared"),
]


def kind_of_address(text: str) -> str:
    """Name the kind of an address, for example "private IPv4"; "" for what is no address."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return ""
    kind = next((kind for fits, kind in TESTS if fits(address)), "public")
    return f"{kind} IPv{address.version}"
