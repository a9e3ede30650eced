"""Configure `make notebooks`, which executes notebooks in place for git and readers.

On the same machine the same code gives the same bytes, except in cells tagged
`nbval-ignore-output`: cell ids stay; timings and other traces of a run are
removed. On another processor the coordinates in a picture may differ in their
last digits; tests/pictures.py checks the rest.
"""

c = get_config()  # noqa: F821 (of nbconvert)
c.ExecutePreprocessor.timeout = 1200
c.ExecutePreprocessor.record_timing = False
c.ExecutePreprocessor.coalesce_streams = True
c.ClearMetadataPreprocessor.enabled = True
c.ClearMetadataPreprocessor.preserve_cell_metadata_mask = {"tags"}
kept = {"kernelspec", ("language_info", "name")}
c.ClearMetadataPreprocessor.preserve_nb_metadata_mask = kept
