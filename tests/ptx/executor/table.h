// The table of operations: their names, and the functions that execute them for a warp.
#pragma once

#include <string>
#include <vector>

#include "state.h"

struct Operation {
  std::string name;
  Step step;
};

struct Table {
  std::vector<Operation> operations;
  void add(std::string name, Step step) { operations.push_back({std::move(name), step}); }
};

void add_integers(Table&);
void add_floats(Table&);
void add_conversions(Table&);
void add_memory(Table&);
void add_copies(Table&);
void add_collectives(Table&);
void add_tensor(Table&);
void add_control(Table&);
void add_wgmma(Table&);
void add_mbarrier(Table&);
void add_bulk(Table&);
