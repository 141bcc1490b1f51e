"""The shape of the tree: who imports whom, what every rule has, and which words are not used."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

import spec  # noqa: F401  enters the rules
from spec.broken import BROKEN
from spec.rules import AREAS, RULES, WITHDRAWN

ROOT = Path(__file__).parents[1]
PACKAGES = ("spec", "reference", "optimized", "kernels")
GENERATED = {"_build", "__pycache__", "build", "dist"}


def files(*tops: str, suffixes: tuple[str, ...] = (".py",)) -> list[Path]:
    """The files below these folders, or the files themselves, that a person wrote."""
    found = [p for top in tops for p in [ROOT / top, *(ROOT / top).rglob("*")] if p.is_file() and p.suffix in suffixes]
    return sorted(p for p in found if not GENERATED & set(p.parts) and not any(x.startswith(".") for x in p.parts[1:]))


def none(offences: list[str]) -> None:
    """There are none; otherwise all of them are shown."""
    assert not offences, "\n" + "\n".join(offences)


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


# Who may import whom


@dataclass(frozen=True)
class Import:
    """A module that a file imports, and whether importing the file is enough to import it."""

    module: str
    line: int
    at_once: bool

    @property
    def top(self) -> str:
        return self.module.partition(".")[0]


def imports_of(path: Path) -> list[Import]:
    package = path.relative_to(ROOT).parent.parts
    return list(_imports(tree_of(path), package, at_once=True))


def _imports(node: ast.AST, package: tuple[str, ...], at_once: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (Import(each.name, child.lineno, at_once) for each in child.names)
        elif isinstance(child, ast.ImportFrom):
            base = package[: len(package) - child.level + 1] if child.level else ()
            module = ".".join([*base, *([child.module] if child.module else [])])
            # `from spec import rules` is about spec.rules; whether `rules` is a module is for the file system to say.
            for each in child.names:
                inner = ROOT.joinpath(*module.split("."), each.name)
                is_module = inner.is_dir() or inner.with_suffix(".py").is_file()
                yield Import(f"{module}.{each.name}" if is_module else module, child.lineno, at_once)
        else:
            inside = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) or _is_type_checking(child)
            yield from _imports(child, package, at_once and not inside)


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


IMPORTED_AS = {"pyyaml": "yaml"}


def declared() -> frozenset[str]:
    """The import names of what a user of the engine may have installed."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project.get("optional-dependencies", {})
    wanted = [
        each
        for name, extra in extras.items()
        if name not in ("conformance", "formal", "docs", "test")
        for each in extra
    ]
    names = (re.match(r"[\w.-]+", each) for each in [*project["dependencies"], *wanted])
    found = (name.group().lower().replace("-", "_") for name in names if name)
    return frozenset(IMPORTED_AS.get(name, name) for name in found)


@dataclass(frozen=True)
class Allowance:
    """What the files of one part of the tree may import besides the standard library and themselves."""

    ours: tuple[str, ...] = ()
    others: frozenset[str] = frozenset()

    def allows(self, module: str) -> bool:
        known = module.partition(".")[0] in sys.stdlib_module_names | self.others
        return known or any(module == each or module.startswith(each + ".") for each in self.ours)


ENGINE_MAY_KNOW = ("spec.vocabulary", "spec.engine")


def allowance(path: Path) -> Allowance:
    parts = path.relative_to(ROOT).parts
    match parts:
        case ("spec", "proofs", *_):
            return Allowance(("spec",), frozenset({"z3", "cvc5"}))
        case ("spec", "conformance", "adapters", *_):
            adapted = path.stem.partition("_")[0]  # a file is called after the engine that it adapts
            return Allowance(("spec", *PACKAGES), frozenset({"pytest", "hypothesis", "numpy", adapted}))
        case ("spec", "conformance", *_):
            return Allowance(("spec",), frozenset({"pytest", "hypothesis", "numpy"}))
        case ("spec", *_):
            return Allowance(("spec",))
        case ("reference", *_):
            return Allowance(("reference", *ENGINE_MAY_KNOW), frozenset({"numpy"}))
        case ("kernels", "cpu", *_):
            return Allowance(("kernels",), frozenset({"torch", "numpy", "numba", "llvmlite"}))
        case ("kernels", *_):
            return Allowance(("kernels",), frozenset({"torch", "triton"}))
        case ("optimized", *_) if is_command_line(path):
            return Allowance(PACKAGES, declared() | {"pytest"})
        case ("optimized", *_):
            return Allowance(("optimized", "kernels", *ENGINE_MAY_KNOW, "spec.trace", "spec.batches"), declared())
    raise AssertionError(f"no rule says what {path} may import")


def is_command_line(path: Path) -> bool:
    return path.relative_to(ROOT).parts[:2] in (("optimized", "cli"), ("optimized", "cli.py"))


def test_every_file_imports_what_the_table_of_the_design_allows() -> None:
    offences = [
        f"{name_of(path)}:{each.line} imports {each.module}"
        for path in files(*PACKAGES)
        for each in imports_of(path)
        if not allowance(path).allows(each.module)
    ]
    none(offences)


def test_the_core_of_the_specification_knows_neither_its_proofs_nor_its_suite() -> None:
    core = [path for path in files("spec") if path.parent == ROOT / "spec"]
    offences = [
        f"{name_of(path)}:{each.line} imports {each.module}"
        for path in core
        for each in imports_of(path)
        if each.module.startswith(("spec.proofs", "spec.conformance"))
    ]
    none(offences)


def test_an_adapter_imports_one_engine_inside_its_factory() -> None:
    for path in files("spec/conformance/adapters"):
        found = [each for each in imports_of(path) if each.top not in {"spec", *sys.stdlib_module_names}]
        engines = [each for each in found if each.top not in {"pytest", "hypothesis", "numpy"}]
        assert len({each.top for each in engines}) <= 1, f"{name_of(path)} adapts more than one engine"
        assert not any(each.at_once for each in engines), f"{name_of(path)} imports its engine before it is asked to"


HEAVY = {"torch", "numpy", "triton", "numba", "fastapi", "starlette", "uvicorn", "pydantic", "transformers", "ray"}


def loaded_by(module: str) -> set[str]:
    """What a fresh interpreter has loaded when it has imported the module."""
    probe = f"import sys, {module}; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", probe], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(run.stdout.split())


@pytest.mark.parametrize("package", ["spec", "optimized", "kernels"])
def test_importing_a_package_loads_nothing_heavy(package: str) -> None:
    assert HEAVY & loaded_by(package) == set()


def test_the_command_line_imports_the_other_packages_when_a_command_needs_them() -> None:
    loaded = loaded_by("optimized.cli")
    assert (HEAVY | {"reference", "kernels", "spec.rules", "spec.conformance", "spec.proofs"}) & loaded == set()


# What every rule has

MENTION = re.compile(rf"\b(?:{'|'.join(AREAS)})-\d+\b")
TEXTS = (".py", ".md", ".rst", ".txt", ".toml")


def test_every_rule_id_in_the_tree_exists() -> None:
    """But for number 999 of an area, by which tests call a rule that does not exist."""
    everywhere = files(
        *PACKAGES, "tests", "docs", "README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", suffixes=TEXTS
    )
    unknown = [
        f"{name_of(path)} mentions {rule_id}"
        for path in everywhere
        for rule_id in sorted(set(MENTION.findall(path.read_text(encoding="utf-8"))))
        if rule_id not in RULES and rule_id not in WITHDRAWN and not rule_id.endswith("-999")
    ]
    none(unknown)


def named_tests() -> set[str]:
    return {
        node.name
        for path in files("tests")
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
    }


def test_every_rule_has_a_test_that_is_named_after_it() -> None:
    names = named_tests()
    prefixes = {rule_id: f"test_{rule_id.lower().replace('-', '_')}_" for rule_id in RULES}
    none([rule_id for rule_id, prefix in prefixes.items() if not any(n.startswith(prefix) for n in names)])


def test_every_test_that_is_named_after_a_rule_names_one_that_exists() -> None:
    pattern = re.compile(rf"test_({'|'.join(AREAS)})_(\d+)_", re.IGNORECASE)
    matches = filter(None, map(pattern.match, sorted(named_tests())))
    none([m.string for m in matches if f"{m[1].upper()}-{m[2]}" not in RULES])


def test_every_rule_has_a_broken_example() -> None:
    assert set(BROKEN) == set(RULES)


# Words

BANNED = {
    "block_manager": "a pool",
    "block_list": "block_table",
    "cached_len": "num_computed_tokens",
    "context_len": "num_computed_tokens or num_tokens",
    "context_lens": "seq_lens",
    "cow_copy": "copy",
    "cu_seqlens": "query_start",
    "cu_seqlens_q": "query_start",
    "deallocate": "release",
    "device_len": "num_computed_tokens",
    "evict_request": "preempt",
    "evict_seq": "preempt",
    "evict_sequence": "preempt",
    "extend_len": "num_scheduled_tokens",
    "free_block": "release",
    "free_blocks": "release, or num_free_blocks",
    "head_dim": "head_size",
    "is_decode": "a description, never a flag",
    "is_prefill": "a description, never a flag",
    "max_running_req": "max_num_seqs",
    "n_head": "num_query_heads",
    "owner": "a holder",
    "num_cached_tokens": "num_computed_tokens or num_hit_tokens",
    "page": "block",
    "page_size": "block_size",
    "page_table": "block_table",
    "pages": "blocks",
    "prefill_budget": "max_num_batched_tokens",
    "ref_cnt": "ref_count",
    "refcnt": "ref_count",
    "refcount": "ref_count",
    "req_to_token": "block_table",
    "seq_group": "a request",
    "sequence_group": "a request",
    "tokens_per_block": "block_size",
    "BLOCK": "TILE_TOKENS or TILE_QUERIES",
    "BLOCK_M": "TILE_QUERIES",
    "BLOCK_N": "TILE_TOKENS",
    "BLOCK_SIZE": "block_size, or TILE_TOKENS",
    "Job": "Request",
    "Page": "Block",
    "PageTable": "BlockTable",
    "Req": "Request",
    "Sequence": "Seq",
    "SequenceGroup": "Request",
}
FOREIGN: dict[tuple[str, str], str] = {}
"""Names of other people's surfaces, with the surface: (file, name)."""

BANNED_MODULES = {"util", "utils", "common", "helper", "helpers", "base", "manager", "misc"}


def names_defined(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """What a module gives a name to: functions, classes, parameters, variables, attributes of ``self``."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name, node.lineno
            case ast.arg(arg=name):
                yield name, node.lineno
            case ast.Name(id=name, ctx=ast.Store()):
                yield name, node.lineno
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                yield name, node.lineno


def test_banned_words_name_nothing_of_ours() -> None:
    offences = [
        f"{name_of(path)}:{line} defines {name}: say {BANNED[name.lstrip('_')]}"
        for path in files(*PACKAGES)
        for name, line in names_defined(tree_of(path))
        if name.lstrip("_") in BANNED and (name_of(path), name) not in FOREIGN
    ]
    none(offences)


PHRASES = {"page table": "block table", "owner": "holder", "sequence group": "request", "prefill phase": "prefill"}


def test_banned_words_are_not_in_our_sentences() -> None:
    """What the glossary says, in the docstrings and comments of our own modules."""
    offences = [
        f"{name_of(path)}:{number} says {phrase}: say {PHRASES[phrase]}"
        for path in files(*PACKAGES)
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        for phrase in PHRASES
        if re.search(rf"\b{phrase}s?\b", line, re.IGNORECASE)
    ]
    none(offences)


def test_no_module_is_called_after_nothing() -> None:
    none([name_of(path) for path in files(*PACKAGES) if path.stem in BANNED_MODULES])


# Style


def test_no_module_of_ours_asserts() -> None:
    """Python without asserts must do the same; what must hold is a rule, or an error with its facts."""
    offences = [
        f"{name_of(path)}:{node.lineno}"
        for path in files(*PACKAGES)
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Assert)
    ]
    none(offences)


MACHINE = re.compile(r"(?<![\w.])/(?:home|work|root|Users)/\w")


def test_no_file_knows_the_machine_it_was_written_on() -> None:
    offences = [
        f"{name_of(path)}:{number}"
        for path in files(*PACKAGES, "tests", "docs", "README.md", "CONTRIBUTING.md", "SECURITY.md", suffixes=TEXTS)
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if MACHINE.search(line)
    ]
    none(offences)


MOST_LINES = 500
LONG_FOR_A_REASON = {
    "spec/broken.py": "one list: an example for each rule",
    "spec/proofs/mutations.py": "one list: the sabotages of the proved model",
}
"""Files that may be longer, with the reason: otherwise split them."""


def test_no_file_is_longer_than_a_person_reads() -> None:
    lengths = {name_of(path): len(path.read_text(encoding="utf-8").splitlines()) for path in files(*PACKAGES, "tests")}
    long = [f"{name} has {n} lines" for name, n in lengths.items() if n > MOST_LINES and name not in LONG_FOR_A_REASON]
    none(long)


def test_every_file_says_what_it_is() -> None:
    silent = [
        name_of(path) for path in files(*PACKAGES) if path.read_text().strip() and not ast.get_docstring(tree_of(path))
    ]
    none(silent)


# What could run what others wrote

LOADERS = {"pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
RUNNERS = {"eval", "exec", "os.system", "os.popen", "torch.load", "yaml.load", "yaml.unsafe_load", "pty.spawn"}
SWITCHES = {"shell", "trust_remote_code", "allow_pickle"}
RUNS_OUR_OWN = {"spec/proofs/mutations.py": "it runs our own model with one change in it"}


def dangers_in(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Loaded objects, texts that are run, and switches that allow either."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from ((each.name, node.lineno) for each in names if each.name.partition(".")[0] in LOADERS)
            case ast.ImportFrom(module=str(module)) if module.partition(".")[0] in LOADERS:
                yield module, node.lineno
            case ast.Call(func=ast.Name() | ast.Attribute() as function) if ast.unparse(function) in RUNNERS:
                yield ast.unparse(function), node.lineno
            case ast.keyword(arg=str(name), value=value) if name in SWITCHES and ast.unparse(value) != "False":
                yield name, node.value.lineno


def test_nothing_of_ours_loads_objects_or_runs_texts() -> None:
    """Servers were taken over by pickles, templates and expressions; ours has nothing to take over."""
    assert len(list(dangers_in(ast.parse("import pickle.x\nfrom dill import y\neval(z)\nf(shell=True, b=1)")))) == 4
    offences = [
        f"{name_of(path)}:{line} has {what}"
        for path in files(*PACKAGES)
        if name_of(path) not in RUNS_OUR_OWN
        for what, line in dangers_in(tree_of(path))
    ]
    none(offences)
