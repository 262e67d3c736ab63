"""Which moves lead from one layout to another: the cheapest route, its price, its bytes, the bound below them."""
