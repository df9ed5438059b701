"""Every developer command: `nox -l` lists them, `nox -s NAME` runs one.

Sessions make their own environment with the versions in tests/constraints.txt. The sessions for GPUs use the current
Python, and each is one plain command that also runs without nox.
"""

from __future__ import annotations

import nox

nox.options.default_venv_backend = "virtualenv"
nox.options.reuse_existing_virtualenvs = True
nox.options.sessions = ["lint", "types", "tests"]

CONSTRAINTS = "tests/constraints.txt"
SUITE_REQUIREMENTS = (
    *("pytest-xdist", "pytest-rerunfailures", "pytest-random-order", "psutil", "pandas", "scikit-learn", "tensorboard"),
    *("cloudpickle", "fastapi", "uvicorn", "httpx"),
)
"""Packages that the tests of Lightning need besides those of this package."""


def _install(session: nox.Session, *extras: str) -> None:
    """Install this project, editable, with extras and the tested versions. Skipped with `-r`."""
    # --no-compile: what is imported is compiled then, a small part of what comes with torch and transformers. It must
    # be kept, even where the user's Python keeps no compiled files: else each process compiles for several seconds.
    session.env["PYTHONDONTWRITEBYTECODE"] = ""
    package = f".[{','.join(extras)}]" if extras else "."
    session.install("-q", "--no-compile", "-e", package, "-c", CONSTRAINTS)


@nox.session
def quickstart(session: nox.Session) -> None:
    """Train a small Qwen3-MoE on the standard library's sources, generate text, export. About a minute on a CPU."""
    _install(session, "viz")
    session.run("python", "examples/qwen3_moe/quickstart.py", *session.posargs)


@nox.session
def tests(session: nox.Session) -> None:
    """Run all tests that need no GPU."""
    _install(session, "test")
    # One thread a process: the models are tiny, and rank tests fill the cores with processes.
    session.run("python", "-m", "tests", *session.posargs, env={"OMP_NUM_THREADS": "1"})


@nox.session(default=False)
def quick(session: nox.Session) -> None:
    """Run the quick tests, and ten of two ranks: at most two minutes on two cores. tests/README.md describes them."""
    _install(session, "test")
    session.run("python", "-m", "tests", "quick", *session.posargs, env={"OMP_NUM_THREADS": "1"})


@nox.session(default=False)
def meshes(session: nox.Session) -> None:
    """Run the rows of grids that the other sessions leave out: every mesh, schedule and size.

    On GPUs use `--device cuda`.
    """
    _install(session, "test")
    session.run("python", "-m", "tests", "meshes", *session.posargs, env={"OMP_NUM_THREADS": "1"})


@nox.session(default=False)
def chaos(session: nox.Session) -> None:
    """Kill training jobs at random moments, 200 times by default, and resume from their checkpoints.

    `-- --kills N --jobs N` sets the numbers of kills and jobs.
    """
    _install(session, "test")
    session.run("python", "-m", "tests.chaos", *session.posargs, env={"OMP_NUM_THREADS": "1"})


@nox.session(default=False)
def fuzz(session: nox.Session) -> None:
    """Pass randomly changed files to readers, for an hour unless `-- --minutes N --jobs N`."""
    _install(session, "test")
    session.run("python", "-m", "tests.fuzz", *session.posargs, env={"OMP_NUM_THREADS": "1"})


@nox.session(default=False)
def stress(session: nox.Session) -> None:
    """Run tests whose processes fork or end, 200 times, three at a time; `-- --rounds N --jobs N` for others."""
    _install(session, "test")
    session.run("python", "-m", "tests.stress", *session.posargs, env={"OMP_NUM_THREADS": "1"})


@nox.session
def lint(session: nox.Session) -> None:
    """Check format, style, import layers, spelling and words."""
    # Not the project: these tools read the code and import none of it.
    session.install("-q", "ruff", "import-linter", "codespell", "-c", CONSTRAINTS)
    session.run("ruff", "format", "--check", ".")
    session.run("ruff", "check", ".")
    session.run("lint-imports", env={"PYTHONPATH": "."})
    session.run("codespell", "lightning_d9d", "tests", "examples", "docs", "README.md", "CHANGELOG.md", "noxfile.py")
    session.run("python", "-m", "tests.words")


@nox.session
def types(session: nox.Session) -> None:
    """Check static types with pyright."""
    _install(session, "dev")
    session.run("pyright", *session.posargs)


@nox.session
def docs(session: nox.Session) -> None:
    """Build the documentation into site/."""
    _install(session, "docs")
    session.run("mkdocs", "build", "--strict", "--config-file", "docs/mkdocs.yml", *session.posargs)


@nox.session(default=False)
def minimums(session: nox.Session) -> None:
    """Run the tests with torch 2.11, the oldest supported (several GB to download)."""
    session.install("-q", "torch==2.11.0", "numpy<2.4")  # with later ones the interpreter of its Triton fails
    session.install("-q", "-e", ".[test]")
    session.run("python", "-m", "tests", *session.posargs, env={"OMP_NUM_THREADS": "1"})


@nox.session(default=False)
def latest(session: nox.Session) -> None:
    """Run the tests with the newest torch and Lightning of the registry (several GB to download)."""
    session.install("-q", "-e", ".[test]")
    session.install("-q", "--upgrade", "torch", "lightning")  # apart: also beyond the bounds of pyproject.toml
    session.run("python", "-m", "tests", *session.posargs, env={"OMP_NUM_THREADS": "1"})


@nox.session(default=False)
def lightning_suite(session: nox.Session) -> None:
    """Run Lightning's own tests under D9DStrategy, and compare failures with a list: `-- PATH` of a checkout.

    This takes about 15 minutes.
    """
    _install(session, "test")
    session.install("-q", *SUITE_REQUIREMENTS, "-c", CONSTRAINTS)
    session.run("python", "-m", "tests.lightning_suite", *session.posargs, env={"OMP_NUM_THREADS": "1"})


@nox.session(default=False)
def litdata(session: nox.Session) -> None:
    """Run tests with litdata.

    They are not in the other sessions, because litdata installs torchvision and cloud clients.
    """
    _install(session, "test")
    session.install("-q", "litdata", "-c", CONSTRAINTS)
    session.run("pytest", "-m", "litdata", *session.posargs, env={"OMP_NUM_THREADS": "1"})


@nox.session(default=False, python="3.11")
def loggers(session: nox.Session) -> None:
    """Run tests with TensorBoard, W&B, MLflow and Aim.

    They are not in the other sessions, because these install servers and databases.
    """
    _install(session, "test", "aim")
    session.install("-q", "tensorboard", "wandb", "mlflow-skinny")
    session.run("pytest", "-m", "loggers", *session.posargs, env={"OMP_NUM_THREADS": "1"})


@nox.session(default=False)
def mpi(session: nox.Session) -> None:
    """Run tests with mpi4py.

    They are not in the other sessions, because every process that makes a Trainer would start MPI.
    """
    _install(session, "test")
    session.install("-q", "mpi4py", "mpich")
    session.run("pytest", "-m", "mpi", *session.posargs, env={"OMP_NUM_THREADS": "1"})


@nox.session(venv_backend="none", default=False)
def gpu(session: nox.Session) -> None:
    """Run tests that need one GPU: `python -m pytest -m gpu`."""
    session.run("python", "-m", "pytest", "-m", "gpu", *session.posargs)


@nox.session(venv_backend="none", default=False)
def gpu_ranks(session: nox.Session) -> None:
    """Run the rank tests with nccl, as far as there are GPUs: `python -m pytest -m ranks --device cuda`."""
    session.run("python", "-m", "pytest", "-m", "ranks", "--device", "cuda", *session.posargs)


@nox.session(venv_backend="none", default=False)
def sanitizer(session: nox.Session) -> None:
    """Run every op at small sizes while each access to a GPU's memory is checked.

    This takes about four minutes on an H200.
    """
    watched = ["compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "9"]
    command = [*watched, "python", "-m", "tests.ops.sanitized", *session.posargs]
    session.run(*command, env={"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}, external=True)


@nox.session(venv_backend="none", default=False)
def bench(session: nox.Session) -> None:
    """Run benchmarks, each against a peer in the same run: `python -m tests.benchmarks`."""
    session.run("python", "-m", "tests.benchmarks", *session.posargs)
