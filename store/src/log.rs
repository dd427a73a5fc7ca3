//! One line on stderr for each change of state; the supervisor passes it on to the server's log.

use std::fmt;

pub fn info(message: &str) {
    write("INFO", message);
}

pub fn warn(message: &str) {
    write("WARNING", message);
}

fn write(level: &str, message: &str) {
    use std::io::Write;
    let line = format!("polign-store: {level}: {}\n", message.replace('\n', " "));
    // Nobody may be reading any more.
    let _ = std::io::stderr().write_all(line.as_bytes());
}

/// Something that works or does not, and is mentioned when that changes.
#[derive(Debug)]
pub struct Condition {
    what: &'static str,
    is_bad: bool,
}

impl Condition {
    pub fn new(what: &'static str) -> Self {
        Self { what, is_bad: false }
    }

    pub fn good(&mut self) {
        if std::mem::replace(&mut self.is_bad, false) {
            info(&format!("{} works again", self.what));
        }
    }

    pub fn bad(&mut self, why: &(impl fmt::Display + ?Sized)) {
        if !std::mem::replace(&mut self.is_bad, true) {
            warn(&format!("{} fails: {why}", self.what));
        }
    }
}
