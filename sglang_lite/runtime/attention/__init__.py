"""GPU attention behind one interface, with one file per backend. Depends on the plan of a step, not
on requests.
"""
