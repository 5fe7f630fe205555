import subprocess
import sys

import pytest

from k2jax.data import builtin


def test_a_file_gives_its_source_or_its_documentation():
    doc = '"""' + "Words about the module. " * 20 + '"""\n'
    files = [("a.py", doc + "x = 1\n"), ("b.py", "x = 1\n" * 300), ("c.py", "y = 2\n" * 300 + doc)]
    code, documentation = builtin.split_sources(files, code_bytes=10**6, web_bytes=10**6)
    assert sorted(code) == sorted([files[1][1], files[2][1]])  # c.py is poor in documentation
    assert documentation == [("Words about the module. " * 20).strip()]
    # Past the cap for code the rest gives documentation, past that cap nothing.
    code, documentation = builtin.split_sources(files, code_bytes=0, web_bytes=10**6)
    assert code == [] and len(documentation) == 2
    assert builtin.split_sources(files, code_bytes=0, web_bytes=1)[1] == documentation[:1]


def test_docstrings_are_found_and_string_values_are_not():
    text = '"""Module."""\nx = """value"""\nclass A:\n    """Of a class.\n\n    More.\n    """\n'
    text += '    def f(self):\n        r"""Of f."""\n'
    assert builtin.docstrings(text) == ["Module.", "Of a class.\n\nMore.", "Of f."]


def test_sources_leave_tests_and_other_encodings_out(tmp_path, write):
    write(tmp_path, {"pkg/a.py": "a", "pkg/tests/b.py": "b", "pkg/test_c.py": "c", "d.txt": "d"})
    (tmp_path / "latin.py").write_bytes(b"# caf\xe9")
    assert builtin.sources(tmp_path, "x") == [("x/pkg/a.py", "a")]


@pytest.mark.slow
def test_builtin_corpus_has_four_domains_and_imports_no_package():
    script = (
        "import sys\nfrom k2jax.data import builtin\nbefore = set(sys.modules)\n"
        "made = builtin.documents(code_bytes=300_000, web_bytes=300_000, math_bytes=100_000)\n"
        "new = {m.split('.')[0] for m in set(sys.modules) - before} & set(builtin.PACKAGES)\n"
        "print(sorted(new), *(f'{d} {sum(len(t.encode()) for t in made[d])}' for d in made), sep='|')"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    imported, *sizes = done.stdout.strip().split("|")
    assert imported == "[]"
    sizes = {domain: int(size) for domain, size in (entry.split() for entry in sizes)}
    assert 300_000 <= sizes["code"] < 1_500_000 and 300_000 <= sizes["web"] < 1_500_000
    assert 100_000 <= sizes["math"] < 110_000 and sizes["knowledge"] > 2_000_000
