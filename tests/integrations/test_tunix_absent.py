"""Without tunix one line says how to get it."""

import subprocess
import sys


def test_without_tunix_one_line_says_how_to_get_it():
    code = """
import sys
sys.modules["tunix"] = None  # as if it were not there
import specjax.integrations, specjax.text, specjax.cli.main
try:
    import specjax.integrations.tunix
except ImportError as error:
    print(error)
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    (line,) = ran.stdout.splitlines()
    assert line.startswith("tunix ") and line.endswith("run pip install '.[tunix]' in the checkout")
