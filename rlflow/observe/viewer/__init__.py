"""A run as static web pages: one folder that opens from disk, without a server and without the network.

    write_view(RunFolder("checkpoints/my_project/my_run"), Path("view"))

`summary` says what the overview shows, `payload` what the scripts load, `write` makes the folder.
"""

from rlflow.observe.viewer.write import ViewError, ViewReport, write_view

__all__ = ["ViewError", "ViewReport", "write_view"]
