import unittest

from area import area


class Area(unittest.TestCase):
    def test_area(self):
        self.assertEqual(area(3, 4), 12)
