import datetime

from k2jax.data import facts


def test_easter_against_known_dates():
    for date in ("1818-03-22", "1943-04-25", "2000-04-23", "2024-03-31", "2025-04-20", "2038-04-25"):
        day = datetime.date.fromisoformat(date)
        assert facts._easter(day.year) == (day.month, day.day)


def test_years():
    text = facts.years(2024, 2025)[0]
    assert "2024 (MMXXIV) is a leap year, begins on a Monday and ends on a Tuesday" in text
    assert "Easter is on 31 March" in text and "Friday in September and December" in text


def test_characters_and_encodings():
    text = "\n".join(facts.characters())
    assert "U+00E9 (é) is a lowercase letter called LATIN SMALL LETTER E WITH ACUTE, made of latin small letter e and" in text
    assert "U+00BD (½) is a number called VULGAR FRACTION ONE HALF, worth 0.5" in text
    assert any("0x80 is €, euro sign" in document for document in facts.encodings() if "cp1252" in document)


def test_constants_colours_languages_and_topics_are_read_as_text(tmp_path):
    row = f"{'electron mass':<60}{'9.109 383 7139 e-31':<25}{'0.000 000 0028 e-31':<25}kg"
    exact = f"{'speed of light in vacuum':<60}{'299 792 458':<25}{'(exact)':<25}m s^-1"
    (tmp_path / "codata.py").write_text(f'raise RuntimeError("run")\ntxt2018 = ""\ntxt2022 = """\n{row}\n{exact}\n"""\n')
    text = " ".join(facts.constants(tmp_path / "codata.py"))
    assert "The electron mass is 9.1093837139e-31 kg, with a standard uncertainty of 0.0000000028e-31 (CODATA 2022)." in text
    assert "The speed of light in vacuum is 299792458 m s^-1, exactly, by definition" in text
    (tmp_path / "colours.py").write_text("CSS4_COLORS = {'teal': '#008080'}\nXKCD_COLORS = {'xkcd:puce': '#a57e52'}\n")
    text = " ".join(facts.colours(tmp_path / "colours.py"))
    assert "teal in CSS is #008080: red 0, green 128 and blue 128" in text and "puce in the XKCD survey" in text
    (tmp_path / "languages.py").write_text("LEXERS = {'A': ('m', 'Ada', ('ada',), ('*.adb', '*.ads'), ('text/x-ada',))}\n")
    assert "Ada is a language" in facts.languages(tmp_path / "languages.py")[0]
    (tmp_path / "pydoc_data").mkdir()
    (tmp_path / "pydoc_data" / "topics.py").write_text("topics = {'assert': 'The assert statement'}\n")
    assert facts.topics(tmp_path) == ["The assert statement"]
    assert facts.constants(tmp_path / "absent.py") == facts.topics(tmp_path / "absent") == []
