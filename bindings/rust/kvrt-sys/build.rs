//! Finds libkvrt: in `KVRT_LIB_DIR`, else by `pkg-config kvrt`. Says everything it tried when it
//! finds none.

use std::env;
use std::path::{Path, PathBuf};
use std::process::{exit, Command};

/// The first release with every function that this crate declares.
const MINIMUM_VERSION: &str = "0.1.0";

fn main() {
    for name in ["KVRT_LIB_DIR", "PKG_CONFIG", "PKG_CONFIG_PATH", "PKG_CONFIG_LIBDIR"] {
        println!("cargo:rerun-if-env-changed={name}");
    }
    println!("cargo:rerun-if-changed=build.rs");
    // Documentation is built without the library.
    if env::var_os("DOCS_RS").is_some() {
        return;
    }
    // Set to nothing is not set, as a Makefile or a CI's settings often have it.
    let folder = env::var_os("KVRT_LIB_DIR").filter(|folder| !folder.is_empty());
    let found = match folder {
        Some(folder) => find_in(Path::new(&folder)).map(|folder| vec![folder]),
        None => ask_pkg_config(),
    };
    match found {
        Ok(folders) => {
            for folder in &folders {
                println!("cargo:rustc-link-search=native={}", folder.display());
            }
            if let Some(folder) = folders.first() {
                println!("cargo:lib_dir={}", folder.display());
            }
            println!("cargo:rustc-link-lib=kvrt");
        }
        Err(tried) => {
            eprintln!("kvrt-sys: libkvrt was not found.\n{tried}");
            eprintln!("Set KVRT_LIB_DIR to the folder that holds the library, or PKG_CONFIG_PATH");
            eprintln!("to the folder that holds kvrt.pc. To check: pkg-config --libs kvrt");
            exit(1);
        }
    }
}

/// A folder given by hand must hold the library under one of its names.
fn find_in(folder: &Path) -> Result<PathBuf, String> {
    let names = ["libkvrt.so", "libkvrt.dylib", "kvrt.lib"];
    let mut tried = String::from("KVRT_LIB_DIR is set, so only there was looked:");
    for name in names {
        let path = folder.join(name);
        if path.exists() {
            return folder
                .canonicalize()
                .map_err(|error| format!("{tried}\n  {}: {error}", path.display()));
        }
        tried += &format!("\n  {}: no such file", path.display());
    }
    Err(tried)
}

/// The library folders that pkg-config names; none when the linker looks there anyway.
fn ask_pkg_config() -> Result<Vec<PathBuf>, String> {
    let program = env::var_os("PKG_CONFIG").unwrap_or_else(|| "pkg-config".into());
    let wanted = format!("kvrt >= {MINIMUM_VERSION}");
    let command = format!("{} --libs --cflags \"{wanted}\"", program.to_string_lossy());
    let path = match env::var("PKG_CONFIG_PATH") {
        Ok(path) => format!("PKG_CONFIG_PATH={path}"),
        Err(_) => "PKG_CONFIG_PATH is not set".to_string(),
    };
    let tried = format!("KVRT_LIB_DIR is not set.\n{path}\n{command}:");
    let output = Command::new(&program)
        .args(["--libs", "--cflags", &wanted])
        .output()
        .map_err(|error| format!("{tried} could not be run: {error}"))?;
    if !output.status.success() {
        let text = String::from_utf8_lossy(&output.stderr);
        return Err(format!("{tried} {}\n  {}", output.status, text.trim().replace('\n', "\n  ")));
    }
    let flags = split_flags(&String::from_utf8_lossy(&output.stdout));
    Ok(flags.iter().filter_map(|flag| flag.strip_prefix("-L")).map(PathBuf::from).collect())
}

/// Flags stand between blanks; pkg-config puts a backslash before a blank within one.
fn split_flags(text: &str) -> Vec<String> {
    let mut flags = vec![String::new()];
    let mut letters = text.chars();
    while let Some(letter) = letters.next() {
        match letter {
            '\\' => flags.last_mut().unwrap().extend(letters.next()),
            _ if letter.is_whitespace() => flags.push(String::new()),
            _ => flags.last_mut().unwrap().push(letter),
        }
    }
    flags
}
