"""Lists the licence of every package that massl installs, and fails on one that is not known to be compatible.

    python scripts/audit_dependencies.py

Reads only what is installed; no network. SECURITY.md says how to look for published vulnerabilities.
"""

import importlib.metadata
import re
import sys
from collections.abc import Iterator

from packaging.requirements import Requirement

PERMISSIVE = {
    *("0BSD", "Apache-2.0", "Apache-2.0 WITH LLVM-exception", "BSD", "BSD-2-Clause", "BSD-3-Clause", "BSL-1.0"),
    *("CC0-1.0", "HPND", "ISC", "MIT", "MIT-0", "MIT-CMU", "PSF-2.0", "Python-2.0", "Unlicense", "Zlib"),
}
# changed files stay under MPL; massl changes none
FILE_COPYLEFT = {"MPL-2.0"}
# the CUDA libraries that torch for Linux depends on: free to use, not free software, not distributed by massl
NVIDIA = {"LicenseRef-NVIDIA-Proprietary", "NVIDIA Proprietary Software"}
ALLOWED = PERMISSIVE | FILE_COPYLEFT | NVIDIA
WITHOUT_METADATA = {"cuda-toolkit": "LicenseRef-NVIDIA-Proprietary"}  # an empty package that names others
NAMES = {  # other spellings -> SPDX
    "3-Clause BSD License": "BSD-3-Clause",
    "Apache 2.0": "Apache-2.0",
    "Apache License 2.0": "Apache-2.0",
    "Apache Software License": "Apache-2.0",
    "BSD License": "BSD",
    "Historical Permission Notice and Disclaimer (HPND)": "HPND",
    "ISC License (ISCL)": "ISC",
    "MIT License": "MIT",
    "Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0",
    "Python Software Foundation License": "PSF-2.0",
    "The Unlicense (Unlicense)": "Unlicense",
}


def installed_for(name: str, extras: tuple[str, ...] = ()) -> Iterator[importlib.metadata.Distribution]:
    """The packages that `name` needs here, directly or through others, without itself."""
    seen, waiting = {_normal(name)}, [(name, extras)]
    while waiting:
        parent, its_extras = waiting.pop()
        for text in importlib.metadata.distribution(parent).requires or []:
            needed = Requirement(text)
            chosen = needed.marker is None or any(
                needed.marker.evaluate({"extra": extra}) for extra in ("", *its_extras)
            )
            if not chosen or _normal(needed.name) in seen:
                continue
            seen.add(_normal(needed.name))
            waiting.append((needed.name, tuple(needed.extras)))
            yield importlib.metadata.distribution(needed.name)


def licence_of(distribution: importlib.metadata.Distribution) -> str:
    """The licence as an SPDX expression where the package states one; "" if it states nothing."""
    metadata = distribution.metadata
    if metadata.get("License-Expression"):
        return metadata["License-Expression"]
    classifiers = [text for text in metadata.get_all("Classifier") or [] if text.startswith("License :: ")]
    names = [text.rpartition(" :: ")[2] for text in classifiers if text != "License :: OSI Approved"]
    stated = metadata.get("License") or ""
    if not names and 0 < len(stated) <= 60:
        names = [stated]
    fallback = WITHOUT_METADATA.get(_normal(metadata["Name"]), "")
    return " OR ".join(NAMES.get(name, name) for name in names) or fallback


def is_allowed(licence: str) -> bool:
    """Whether one of the alternatives of an expression has only allowed parts."""
    alternatives = re.split(r"\s+OR\s+", licence.replace("(", " ").replace(")", " ").strip())
    return any(
        all(part.strip() in ALLOWED for part in re.split(r"\s+AND\s+", alternative)) for alternative in alternatives
    )


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def main() -> int:
    packages = sorted(installed_for("massl", ("parquet",)), key=lambda found: _normal(found.metadata["Name"]))
    refused = []
    for package in packages:
        licence = licence_of(package)
        name = f"{package.metadata['Name']} {package.version}"
        print(f"{name:36} {licence or 'no licence stated'}")
        if not is_allowed(licence):
            refused.append(name)
    if refused:
        print(f"not in the list of compatible licences: {', '.join(refused)}", file=sys.stderr)
    return 1 if refused else 0


if __name__ == "__main__":
    sys.exit(main())
