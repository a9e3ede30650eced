"""The cost of tests is printed, and a group that has not run is noticed."""

import json

import costs


def test_a_group_without_a_record_is_a_failure(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(costs, "RECORDS", tmp_path)
    for group in costs.GROUPS:
        assert costs.main() == 1
        assert f"{group} left no record" in capsys.readouterr().out
        record = {"processor_seconds": 2.0, "slowness": 2.0, "tests": {group: 3.0}}
        (tmp_path / f"{group}.json").write_text(json.dumps(record), "utf-8")
    assert costs.main() == 0
    printed = capsys.readouterr().out
    assert f"1.5 s  {costs.GROUPS[-1]}\n" in printed
    assert f"{2 * len(costs.GROUPS)} s  in all" in printed
