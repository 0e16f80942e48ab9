//! The tests of the safe layer, as one program: what it gives back is compared with plain formulas
//! in double precision, and wrong use with the error that it must be.

mod common;

mod affine;
mod attention;
mod bad_input;
mod batching;
mod capacity;
mod cuda;
mod demotion;
mod errors;
mod formats;
#[cfg(target_os = "linux")]
mod guards;
mod hooks;
mod policies;
mod retention;
mod sealed;
mod sequences;
mod statistics;
mod steps;
mod tables;
mod threads;
