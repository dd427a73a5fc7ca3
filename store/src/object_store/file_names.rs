//! Names of files for keys of objects.
//!
//! `pg_basebackup` writes no path of more than 99 bytes into its archive, and fails on a longer one. A key
//! holds up to three ids of 32 hexadecimal digits; so a file store, which may lie in the data directory,
//! writes each id as 22 characters of base64url. Everything else in a key stays as it is.

use base64::{Engine, engine::general_purpose::URL_SAFE_NO_PAD as BASE64URL};
use polign_engine::ObjectId;

const SHORT: usize = 22;
const LONG: usize = 32;

/// The path, below the store's directory, of the object with this key.
pub fn path_of(key: &str) -> String {
    each_component(key, |stem| {
        let id = (stem.len() == LONG).then(|| stem.parse::<ObjectId>().ok()).flatten()?;
        // Only the spelling that `key_of` gives back.
        (id.to_string() == stem).then(|| BASE64URL.encode(id.0))
    })
}

/// The key, or its beginning, that a path below the store's directory stands for.
pub fn key_of(path: &str) -> String {
    each_component(path, |stem| {
        let bytes = (stem.len() == SHORT).then(|| BASE64URL.decode(stem).ok()).flatten()?;
        Some(ObjectId(bytes.try_into().ok()?).to_string())
    })
}

/// Replaces what comes before the first dot of each component, where `replace` knows it.
fn each_component(path: &str, replace: impl Fn(&str) -> Option<String>) -> String {
    let components = path.split('/').map(|component| {
        let stem = component.split('.').next().unwrap_or_default();
        match replace(stem) {
            Some(new) => format!("{new}{}", &component[stem.len()..]),
            None => component.to_owned(),
        }
    });
    components.collect::<Vec<_>>().join("/")
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: &str = "0123456789abcdef0123456789abcdef";

    #[test]
    fn keys_come_back_from_their_paths() {
        let keys = [
            format!("7f/{ID}/{ID}/{ID}.seg"),
            format!("owner/{ID}/{ID}"),
            format!("owner/{ID}/heir-{ID}"),
            "store-id".to_owned(),
            // Not as ids are written.
            ID.to_uppercase(),
        ];
        for key in keys {
            assert_eq!(key_of(&path_of(&key)), key);
        }
    }

    #[test]
    fn paths_fit_into_a_base_backup() {
        let longest = format!("polign_store/{}", path_of(&format!("7f/{ID}/{ID}/{ID}.root")));
        assert!(longest.len() <= 99, "{} bytes", longest.len());
        let on_its_way = format!("polign_store/{}", path_of(&format!("7f/{ID}/{ID}/.new-{ID}")));
        assert!(on_its_way.len() <= 99, "{} bytes", on_its_way.len());
    }
}
