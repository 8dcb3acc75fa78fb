"""eecore within other libraries; each module needs the one that it is named after."""
