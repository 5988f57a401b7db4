// All of it as one translation unit, as unity builds have it.
#include "layers.cpp"
#include "main.cpp"
#include "maps.cpp"
#include "rules.cpp"
#include "serving.cpp"
