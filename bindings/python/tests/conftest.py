"""Lets the tests in with_torch/ import the helpers that lie here."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
