"""Files that come with the package; ``SOURCE.md`` says where each is from. Open them with ``importlib.resources``."""
