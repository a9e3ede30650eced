"""Python reads this at its start in every process that finds it on its path."""

import another_processor  # noqa: F401
