"""What massl depends on: licences, and the oldest versions that it declares."""

import importlib.util
import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture(scope="module")
def audit() -> ModuleType:
    spec = importlib.util.spec_from_file_location("audit", ROOT / "scripts" / "audit_dependencies.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_dependency_has_a_compatible_licence(audit: ModuleType) -> None:
    assert audit.main() == 0


@pytest.mark.parametrize(
    ("licence", "allowed"),
    [
        ("MIT", True),
        ("GPL-3.0-only", False),
        ("", False),
        ("MIT AND GPL-3.0-only", False),
        ("GPL-2.0-only OR MIT", True),
        ("(Apache-2.0 OR BSD-2-Clause)", True),
        ("AGPL-3.0-or-later", False),
    ],
)
def test_other_licences_are_refused(audit: ModuleType, licence: str, allowed: bool) -> None:
    assert audit.is_allowed(licence) == allowed


def test_the_audit_covers_packages_of_packages(audit: ModuleType) -> None:
    names = {found.metadata["Name"].lower() for found in audit.installed_for("massl")}
    assert {"torch", "sympy", "timm", "safetensors"} <= names  # sympy comes with torch


def test_the_oldest_declared_versions_are_the_tested_ones() -> None:
    lines = (ROOT / "constraints-min.txt").read_text().splitlines()
    tested = dict(line.lower().replace("_", "-").split("==") for line in lines if not line.startswith("#"))
    tools = [text for text in PROJECT["optional-dependencies"]["dev"] if re.match(r"(hypothesis|pyarrow|pytest)", text)]
    for text in [*PROJECT["dependencies"], *tools]:
        needed = Requirement(text)
        (specifier,) = needed.specifier
        assert specifier.operator == ">=", f"{text} has no oldest version"
        assert Version(tested[needed.name.lower()]) == Version(specifier.version), (
            f"{text}: constraints-min.txt differs"
        )


def test_the_demo_installs_no_extras() -> None:
    make = shutil.which("make")
    if make is None:
        pytest.skip("needs make")
    command = [make, "--no-print-directory", "--dry-run", "--always-make", "demo"]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    (installs,) = [line for line in shown if "pip install" in line]
    assert installs.endswith(" --editable .")
    assert shown[-1].endswith("massl demo --output runs/demo")
