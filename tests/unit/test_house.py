"""Rules of CONTRIBUTING that can be checked automatically."""

import ast
import collections
import configparser
import re
import subprocess
import sys
from pathlib import Path

import pytest

import megakernel
from megakernel.config import yaml_text

REPOSITORY = Path(__file__).parents[2]
PACKAGES = ("megakernel", "launch", "data_pipeline")
SOURCES = sorted(
    path.relative_to(REPOSITORY) for package in PACKAGES for path in (REPOSITORY / package).rglob("*.py")
)
MAX_LINES = 700


def test_imports_go_one_way():
    linter = Path(sys.executable).with_name("lint-imports")
    result = subprocess.run(
        [linter, "--no-cache"], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_no_module_has_a_vague_name():
    vague = {"utils", "util", "helpers", "helper", "common", "misc"}
    assert [path for path in SOURCES if vague & {path.stem, *path.parent.parts}] == []


def test_no_source_file_exceeds_the_line_limit():
    lengths = {path: len((REPOSITORY / path).read_text().splitlines()) for path in SOURCES}
    assert {path: length for path, length in lengths.items() if length > MAX_LINES} == {}


EXPORTED = ("megakernel/checkpoint/modeling/", "megakernel/checkpoint/pretrained")
"""Models of exports, in files of their own: there the package's names are the right ones."""


def test_one_public_class_name_is_one_class():
    """A name of the configuration belongs to its section, as users read it in docs/configuration.md."""
    files = collections.defaultdict(list)
    for package in (*PACKAGES, "benchmarks"):
        for path in sorted((REPOSITORY / package).rglob("*.py")):
            name = str(path.relative_to(REPOSITORY))
            if name.startswith(EXPORTED):
                continue
            for node in ast.parse(path.read_text()).body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    files[node.name].append(name)
    assert len(files) > 300
    assert {name: of for name, of in files.items() if len(of) > 1} == {}


def test_the_architecture_page_names_existing_files():
    text = (REPOSITORY / "ARCHITECTURE.md").read_text()
    top_folders = "megakernel|launch|data_pipeline|configs|tests|slurm|benchmarks|docs"
    named = set(re.findall(rf"`((?:{top_folders})/[\w./]*)`", text))
    assert len(named) > 40
    assert sorted(path for path in named if not (REPOSITORY / path).exists()) == []


def test_cited_sections_of_the_formulas_exist():
    formulas = (REPOSITORY / "docs/formulas.md").read_text()
    sections = set(re.findall(r"^## (\d+)\.", formulas, re.MULTILINE))
    cited = {
        (path, section)
        for path in SOURCES
        for numbers in re.findall(
            r"docs/formulas\.md, (\d+(?:[^.\d)]{1,5}\d+)*)", (REPOSITORY / path).read_text()
        )
        for section in re.findall(r"\d+", numbers)
    }
    assert len(cited) > 20
    assert [citation for citation in cited if citation[1] not in sections] == []


def test_no_document_outside_of_the_repository_is_cited():
    files = subprocess.run(
        ["git", "ls-files"], cwd=REPOSITORY, capture_output=True, text=True, check=True
    ).stdout.split()
    outside = re.compile(
        r"\b(DESIGN|MECHANISMS|VOCABULARY|KERNELS|SLURM)(\.md\b| section| decision)|\.\./shared"
    )
    texts = [path for path in files if path.endswith((".py", ".md", ".yaml", ".cfg", ".txt", ".sbatch"))]
    found = [path for path in texts if outside.search((REPOSITORY / path).read_text(encoding="utf-8"))]
    assert [path for path in found if path != "tests/unit/test_house.py"] == []


def test_only_one_file_patches_another_library():
    own_modules = {*PACKAGES, *sys.stdlib_module_names}
    patching = set()
    for path in SOURCES:
        nodes = list(ast.walk(ast.parse((REPOSITORY / path).read_text())))
        names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
        libraries = {name.split(".")[0] for name in names} - own_modules
        for node in nodes:
            for target in node.targets if isinstance(node, ast.Assign) else ():
                if isinstance(target, ast.Attribute) and ast.unparse(target).split(".")[0] in libraries:
                    patching.add(str(path))
    assert patching == {"megakernel/parallel/device.py"}


PAGES = sorted([*REPOSITORY.glob("*.md"), *REPOSITORY.glob("docs/*.md")])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_relative_link_of_a_page_exists(page):
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text())
    missing = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert missing == []


def test_the_readme_has_at_most_140_lines():
    assert len((REPOSITORY / "README.md").read_text().splitlines()) <= 140


def test_every_message_of_the_troubleshooting_page_is_in_the_code():
    table = (REPOSITORY / "docs/troubleshooting.md").read_text()
    messages = re.findall(r"^\| `([^`]+)`(?: from `doctor`[^|]*)? \|", table, re.MULTILINE)
    sources = "".join((REPOSITORY / path).read_text() for path in (*SOURCES, "Makefile"))
    assert len(messages) > 20
    assert [message for message in messages if message not in sources] == []


def test_every_configuration_key_named_in_a_page_exists():
    parts = re.split(r"^## (.+)$", (REPOSITORY / "docs/configuration.md").read_text(), flags=re.MULTILINE)
    keys = {
        f"{section}.{key}"
        for section, text in zip(parts[1::2], parts[2::2])
        for key in re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)
    }
    sections = "|".join({key.partition(".")[0] for key in keys})
    named = re.compile(rf"`((?:{sections})\.[a-z]\w*)(?!\w|\.\w*`)")
    files = r".+\.(py|yaml|json|sbatch)"
    pages = [page for page in PAGES if page.name != "CHANGELOG.md"]
    found = {key for page in pages for key in named.findall(page.read_text()) if not re.fullmatch(files, key)}
    assert len(found) > 50
    assert found - keys == set()


def test_license_and_version_agree_in_all_files():
    setup = configparser.ConfigParser()
    setup.read(REPOSITORY / "setup.cfg")
    citation = yaml_text.read(REPOSITORY / "CITATION.cff")
    assert {setup["metadata"]["license"], citation["license"]} == {"Apache-2.0"}
    assert {setup["metadata"]["version"], citation["version"]} == {megakernel.__version__}
    text = (REPOSITORY / setup["metadata"]["license_files"]).read_text()
    assert "Apache License" in text
    assert "END OF TERMS AND CONDITIONS" in text


def test_outputs_of_documented_commands_are_ignored_by_git():
    outputs = ["data/stdlib", "runs/first", "models/dense", ".venv/installed"]
    ignored = subprocess.run(
        ["git", "check-ignore", *outputs], cwd=REPOSITORY, capture_output=True, text=True
    )
    assert ignored.stdout.split() == outputs


def test_every_folder_of_sources_is_a_package():
    folders = {path.parent for path in SOURCES}
    assert [folder for folder in folders if not (REPOSITORY / folder / "__init__.py").exists()] == []


def test_no_page_installs_this_package_from_the_public_index():
    """There the name belongs to another project; `extras.install` names it only where it is installed."""
    pages = ["README.md", *(REPOSITORY / "docs").glob("*.md")]
    sources = [path for path in SOURCES if path != Path("megakernel/config/extras.py")]
    installs = re.compile(r"pip install '?megakernel\[")
    found = [path for path in (*pages, *sources) if installs.search((REPOSITORY / path).read_text())]
    assert found == []


@pytest.mark.parametrize("module", ["megakernel.config", "launch.cli"])
def test_configuration_and_command_line_import_no_heavy_library(module):
    heavy = [
        "torch",
        "megatron",
        "deepspeed",
        "datasets",
        "transformers",
        "tokenizers",
        "pyarrow",
        "triton",
        "fastapi",
        "uvicorn",
    ]
    code = f"import sys, {module}; print(sorted(sys.modules.keys() & set({heavy})))"
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    assert result.stdout == "[]\n"


def test_no_test_needs_a_file_outside_of_the_repository():
    tests = [*(REPOSITORY / "tests").rglob("*.py")]
    # Number of folders from a file up to and including the repository.
    depth = {path: len(path.relative_to(REPOSITORY).parts) for path in tests}
    parents_used = {
        path: re.findall(r"__file__\)(?:\.resolve\(\))?\.parents\[(\d+)\]", path.read_text())
        for path in tests
    }
    assert [path for path in tests if any(int(n) >= depth[path] for n in parents_used[path])] == []


SAFE = {
    "torch.load": "weights_only=True",
    "np.load": "allow_pickle=False",
    "from_pretrained": "trust_remote_code=False",
    "yaml.load": "never",
    "pickle.load": "never",
    "pickle.loads": "never",
    "eval": "never",
    "exec": "never",
}
"""Calls that can execute code from a file -> the argument that prevents it."""


def test_no_call_can_execute_code_from_a_file():
    unsafe = []
    for path in SOURCES:
        for node in ast.walk(ast.parse((REPOSITORY / path).read_text())):
            if not isinstance(node, ast.Call):
                continue
            name, arguments = ast.unparse(node.func), {ast.unparse(keyword) for keyword in node.keywords}
            if name.startswith("Auto") and name.endswith(".from_pretrained"):
                name = "from_pretrained"
            if SAFE.get(name, "") not in {*arguments, ""}:
                unsafe.append(f"{path}:{node.lineno} {name}")
    assert unsafe == []
