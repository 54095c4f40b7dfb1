"""Add to the site what is generated: the reference, the notebooks, and files that pages link.

MkDocs calls the functions whose names begin with `on_`.
"""

import io
import os
import re
from collections.abc import Iterator
from contextlib import redirect_stdout, suppress
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import griffe
from mkdocs.structure.files import File
from nbconvert import MarkdownExporter

ROOT = Path(__file__).parents[1]
PARTS = ("risk", "encoders", "losses", "mining", "metrics", "index")
JOBS = (
    *("training.train", "training.TrainingConfig", "tuning.sweep", "tuning.TuningConfig"),
    *("calibration.calibrate", "calibration.CalibrationConfig", "calibration.EvaluationConfig"),
    *("calibration.certify", "calibration.CertificationConfig"),
    *("rcir.retrieval.verification.certify_verifier", "rcir.retrieval.verification.Verifier"),
)
PROJECT = ("CHANGELOG.md", "CONTRIBUTING.md", "ARCHITECTURE.md", "SECURITY.md")
OUTSIDE = re.compile(r"\]\(\.\./([\w./-]+)")  # a link from docs/ to a file of the repository


class Examples(griffe.Extension):
    """Let Griffe parse a section "Example" of a docstring like one of "Examples"."""

    def on_object(self, *, obj, **_):
        if obj.docstring:
            obj.docstring.value = re.sub("^Example:$", "Examples:", obj.docstring.value, flags=re.M)


def on_files(files, config):
    """Add the generated pages, and the files outside docs/ that pages link."""
    texts = [page.content_string for page in files.documentation_pages()]
    for name in {*PROJECT, *(name for text in texts for name in OUTSIDE.findall(text))}:
        content = (ROOT / name).read_bytes()
        files.append(File.generated(config, f"project/{name}", content=content))
    for name, content in (*reference(), *notebooks()):
        files.append(File.generated(config, name, content=content))
    names = [file.src_uri for file in files if re.fullmatch(r"notebooks/.*\.md", file.src_uri)]
    if names:
        config.nav.insert(2, {"Notebooks": names})
    return files


def on_page_markdown(markdown, page, **_):
    """Let links to files outside docs/ point to their copies, and links of these to the pages."""
    if page.file.src_uri.startswith("project/"):
        return markdown.replace("](docs/", "](../")
    return OUTSIDE.sub(r"](project/\1", markdown)


def on_post_page(output, **_):
    """Name the dialog of the search, which the theme leaves without a name."""
    return output.replace('"search" role="dialog"', '"search" role="dialog" aria-label="Search"')


def reference() -> Iterator[tuple[str, str]]:
    """Yield the name and the Markdown of each page of the reference."""
    for package in ("rcir", *(f"rcir.{part}" for part in PARTS)):
        module = import_module(package)
        names = sorted(module.__all__, key=lambda name: name in vars(import_module("rcir.errors")))
        entries = (f"\n::: {package}.{name}\n" for name in names)
        yield f"reference/{package}.md", f"# {package}\n\n{module.__doc__}\n{''.join(entries)}"
    entries = (f"\n::: {name}\n" for name in JOBS)
    yield "reference/jobs.md", f"# Jobs, configurations and verifiers\n{''.join(entries)}"
    cli = import_module("rcir.cli")
    yield "reference/commands.md", "# Commands\n" + "".join(map(command, cli.JOBS | cli.COMMANDS))
    yield "reference/options.md", options_and_routes()


def command(name: str) -> str:
    """Return the help of a command as a section."""
    os.environ["COLUMNS"] = "90"
    with redirect_stdout(io.StringIO()) as screen, suppress(SystemExit):
        import_module("rcir.cli").main([name, "--help"])
    return f"\n## rcir {name}\n\n```text\n{screen.getvalue()}```\n"


def options_and_routes() -> str:
    """Return the options of a request, and the routes of `rcir serve` with their fields."""
    options = import_module("rcir.risk").request_options()
    text = (
        "# Options and HTTP\n\n## Options of a request\n\n| option | values | default | meaning |"
    )
    text += "\n|---|---|---|---|\n"
    for option in options:
        values = ", ".join(f"`{choice}`" for choice in option.choices) or option.kind.__name__
        text += f"| `{option.name}` | {values} | `{option.default}` | {option.help} |\n"
    app = import_module("fastapi").FastAPI()
    app.include_router(import_module("rcir.serving.app").routes_of(SimpleNamespace(settings=None)))
    schema = app.openapi()
    text += "\n## Routes of a server\n\n| route | meaning | fields |\n|---|---|---|\n"
    for path, methods in schema["paths"].items():
        for method, route in methods.items():
            bodies = route.get("requestBody", {}).get("content", {}).values()
            names = dict.fromkeys(name for body in bodies for name in body["schema"]["properties"])
            own = [name for name in names if name not in {option.name for option in options}]
            words = ["the options"] * (len(own) < len(names)) + [f"`{name}`" for name in own]
            text += f"| `{method.upper()} {path}` | {route['description']} | {', '.join(words)} |\n"
    answer = ", ".join(
        f"`{name}`" for name in schema["components"]["schemas"]["Answer"]["properties"]
    )
    return f"{text}\nFields of an answer: {answer}.\n"


def notebooks() -> Iterator[tuple[str, str | bytes]]:
    """Yield pages and figures of the notebooks, with the outputs of `make notebooks` if it ran."""
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        executed = ROOT / "build" / "notebooks" / path.name
        source = executed if executed.is_file() else path
        text, resources = MarkdownExporter().from_filename(source)
        for name, data in resources["outputs"].items():
            text = text.replace(f"]({name})", f"]({path.stem}-{name})")
            yield f"notebooks/{path.stem}-{name}", data
        yield f"notebooks/{path.stem}.md", text
