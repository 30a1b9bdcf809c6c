"""The reference: every module of the package and every public name in it, as it is written."""

import importlib
import inspect

import pytest

from lib import chapters, reference

MODULES = sorted(path for path in (chapters.ROOT / "lib").rglob("*.py") if path.name != "__main__.py")


def test_every_module_is_on_one_page():
    listed = [path for _, modules in reference.PAGES.values() for name in modules for path in reference.sources(name)]
    assert sorted(listed) == [path for path in MODULES if path != chapters.ROOT / "lib" / "__init__.py"]


@pytest.mark.parametrize("name", reference.PAGES)
def test_every_public_name_is_there_with_its_signature_and_words(name):
    title, modules = reference.PAGES[name]
    sections = dict(part.split("\n", 1) for part in reference.page(title, modules).split("\n## ")[1:])
    for path in (path for module in modules for path in reference.sources(module)):
        module = importlib.import_module(".".join(path.relative_to(chapters.ROOT).with_suffix("").parts).removesuffix(".__init__"))
        text = sections[module.__name__]
        for label, value in vars(module).items():
            if label.startswith("_") or not (inspect.isfunction(value) or inspect.isclass(value)) or value.__module__ != module.__name__:
                continue
            if inspect.isfunction(value) and value.__name__ == label:
                parameters = list(inspect.signature(value).parameters)
                line = next(line for line in text.splitlines() if line.startswith(f":::::{{py:function}} {label}("))
                assert all(parameter in line for parameter in parameters), line
            elif inspect.isclass(value):
                assert f":::::{{py:class}} {label}\n" in text
            first = (inspect.getdoc(value) or "").split("\n")[0]
            assert first in text, f"{module.__name__}.{label}"


def test_the_site_has_it(book):
    page = (book / "html" / "api_analysis.html").read_text(encoding="utf-8")
    assert 'id="lib.theory.ToyDynamics.plateau"' in page and "figures 1c and 2" in page
    assert (book / "html" / "genindex.html").read_text(encoding="utf-8").count("lib.theory") >= 3
