//! Replays a trace in batches and compares what comes out: continuous batching with prompts in
//! chunks, drafts, a policy, and blocks that run out.
//!
//! Exit status: 0 all as recorded, 1 something differs or failed, 2 the arguments were wrong.

mod replay;
mod results;
mod trace;

use std::error::Error;
use std::ffi::OsString;
use std::io;
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::process::ExitCode;

use kvrt::LiveKind;

use replay::{replay, Limits};
use trace::Recording;

const USAGE: &str = "\
usage: batching TRACE [--slots N] [--arena-mib N] [--threads N]

Replays a trace (docs/trace.md) in batches and compares what comes out.

  --slots N      sequences that run at once, 1 to 4096 (3)
  --arena-mib N  memory for keys and values in MiB, 2 to 131072 (8)
  --threads N    threads of the library, 1 to 256 (1)
";

struct Arguments {
    trace: PathBuf,
    limits: Limits,
}

/// What is wrong with the arguments is a sentence.
fn parse(words: impl IntoIterator<Item = OsString>) -> Result<Arguments, String> {
    let mut words = words.into_iter();
    let mut trace = None;
    let mut limits = Limits { slots: 3, arena_mib: 8, threads: 1 };
    while let Some(word) = words.next() {
        let text = word.to_string_lossy().into_owned();
        if !text.starts_with('-') {
            if text.is_empty() || trace.replace(PathBuf::from(word)).is_some() {
                return Err("give the path of one trace".to_string());
            }
            continue;
        }
        let bounds = match text.as_str() {
            "--slots" => 1..=4096,
            "--arena-mib" => 2..=131072,
            "--threads" => 1..=256,
            _ => return Err(format!("'{text}' is not an option")),
        };
        let value = words.next().ok_or_else(|| format!("{text} needs a value behind it"))?;
        let value = parse_number(&text, &value.to_string_lossy(), bounds)?;
        match text.as_str() {
            "--slots" => limits.slots = value as usize,
            "--arena-mib" => limits.arena_mib = value,
            _ => limits.threads = value,
        }
    }
    let trace = trace.ok_or_else(|| "give the path of a trace".to_string())?;
    Ok(Arguments { trace, limits })
}

fn parse_number(option: &str, word: &str, bounds: RangeInclusive<u32>) -> Result<u32, String> {
    word.parse().ok().filter(|value| bounds.contains(value)).ok_or_else(|| {
        let (least, most) = (bounds.start(), bounds.end());
        format!("{option} is '{word}', it must be a number from {least} to {most}")
    })
}

/// Whether all is as it was recorded.
fn run(arguments: &Arguments) -> Result<bool, Box<dyn Error>> {
    let recording = Recording::read(&arguments.trace)?;
    let results = replay(&recording, arguments.limits)?;
    results.print(&mut io::stdout().lock())?;
    for kind in [LiveKind::Pools, LiveKind::Sequences, LiveKind::Steps] {
        if kvrt::live_count(kind) != 0 {
            return Err("something of the library is still alive".into());
        }
    }
    Ok(results.all_equal())
}

fn main() -> ExitCode {
    let arguments = match parse(std::env::args_os().skip(1)) {
        Ok(arguments) => arguments,
        Err(problem) => {
            eprint!("batching: {problem}\n\n{USAGE}");
            return ExitCode::from(2);
        }
    };
    match run(&arguments) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => {
            eprintln!("batching: what came out differs from the recording");
            ExitCode::FAILURE
        }
        Err(error) => {
            eprintln!("batching: {error}");
            ExitCode::FAILURE
        }
    }
}
