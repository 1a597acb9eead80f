"""How are all my replicas doing?"""

from pages.widgets import fleet

fleet.show()
