#pragma once

#include "sequence/slots.hpp"
