"""Processes that end with their parent."""

from sglang_lite.server.replicas.tied_process import TiedProcess


def test_a_process_starts_though_the_working_directory_is_gone(monkeypatch, tmp_path):
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend("")
    folder.rmdir()
    process = TiedProcess("builtins:len", {})
    try:
        assert process.wait(60) == 0
    finally:
        process.kill()
