"""How much load can I accept?"""

from pages.widgets import load

load.show()
