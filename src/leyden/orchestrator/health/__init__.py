"""What goes wrong while a run goes on, noticed from its figures."""
