//! The C interface of libkvrt, declared one to one and without logic.
//!
//! `kvrt.h` is the reference: it says what every call does, which errors it has, and from which
//! threads it may be made. The `kvrt` crate is the safe layer.
#![no_std]
#![allow(non_camel_case_types)]

mod constants;
mod functions;
mod policies;
mod structs;

pub use constants::*;
pub use functions::*;
pub use policies::*;
pub use structs::*;
