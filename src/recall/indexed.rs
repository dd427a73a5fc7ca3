//! What an index holds, as SQL: which rows of which table, by which distance of which value.

use std::ffi::{CStr, CString, c_char};

use pgrx::{PgSqlErrorCode, pg_sys};
use polign_engine::Metric;

use super::list;
use crate::{
    am::opclass::{Element, OpClass},
    error::{Error, Result},
    pages::{Index, meta},
};

/// The name of the table in the statements.
const ALIAS: &CStr = c"indexed";

/// An index for the statements that search it. All names in them are quoted and have their schema, unless the
/// caller's `search_path` gives the same. They are in the encoding of the database.
pub struct Indexed {
    pub index: pg_sys::Oid,
    /// As in messages.
    pub name: String,
    pub metric: Metric,
    pub element: Element,
    pub dim: usize,
    /// The type of the indexed value.
    pub value_type: pg_sys::Oid,
    /// The function of the operator that the index orders by.
    pub distance: pg_sys::Oid,
    /// The value that is indexed.
    value: Vec<u8>,
    /// The operator.
    operator: Vec<u8>,
    /// The table, and the predicate of a partial index.
    rows: Vec<u8>,
}

impl Indexed {
    /// Describes an open index. One that the planner does not use is an error.
    pub fn of(index: Index) -> Result<Self> {
        let relation = index.relation();
        // SAFETY: an open index of this access method has one column, and an order-by operator for it, by
        // amvalidate; its table is there as long as it is.
        unsafe {
            let form = (*relation).rd_index;
            if !(*form).indisvalid {
                return Err(Error::new(
                    PgSqlErrorCode::ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE,
                    format!("index \"{}\" is not valid", index.name()),
                )
                .detail("CREATE INDEX CONCURRENTLY or REINDEX CONCURRENTLY did not finish it.")
                .hint("Drop it, or REINDEX it."));
            }
            let OpClass { metric, element } = OpClass::of(relation)?;
            let (family, value_type) = (*(*relation).rd_opfamily, *(*relation).rd_opcintype);
            let operator = pg_sys::get_opfamily_member(family, value_type, value_type, 1);
            Ok(Self {
                index: index.oid(),
                name: index.name(),
                metric,
                element,
                dim: meta::read(index)?.dim as usize,
                value_type,
                distance: pg_sys::get_opcode(operator),
                value: value(relation),
                operator: operator_sql(operator),
                rows: rows(relation),
            })
        }
    }

    /// All rows that the index is for: ctid and value.
    pub fn all_rows(&self) -> CString {
        sql(&[b"SELECT ctid, ", &self.value, b" FROM ", &self.rows])
    }

    /// A search for the parameter: ctid and distance of the nearest `limit` rows.
    pub fn search(&self, limit: usize) -> CString {
        let distance = [&self.value[..], b" ", &self.operator, b" $1"].concat();
        let limit = limit.to_string();
        sql(&[
            b"SELECT ctid, ",
            &distance,
            b" FROM ",
            &self.rows,
            b" ORDER BY ",
            &distance,
            b" LIMIT ",
            limit.as_bytes(),
        ])
    }
}

/// The value of a row: a column or an expression.
///
/// # Safety
/// `index` is an open index of this access method.
unsafe fn value(index: pg_sys::Relation) -> Vec<u8> {
    // SAFETY: by contract; it has one column.
    unsafe {
        let form = (*index).rd_index;
        let (table, column) = ((*form).indrelid, (*form).indkey.values.as_slice(1)[0]);
        if column > 0 {
            let name = pg_sys::quote_identifier(pg_sys::get_attname(table, column, false));
            return [ALIAS.to_bytes(), b".", bytes(name)].concat();
        }
        let expressions = pg_sys::RelationGetIndexExpressions(index);
        match list::nth(expressions, 0) {
            Some(expression) => [b"(", &*deparse(expression, table), b")"].concat(),
            None => Vec::new(),
        }
    }
}

/// What stands behind FROM.
///
/// # Safety
/// `index` is an open index.
unsafe fn rows(index: pg_sys::Relation) -> Vec<u8> {
    // SAFETY: by contract.
    unsafe {
        let table = (*(*index).rd_index).indrelid;
        let schema = pg_sys::get_namespace_name(pg_sys::get_rel_namespace(table));
        let name = pg_sys::quote_qualified_identifier(schema, pg_sys::get_rel_name(table));
        // Not the children of a table, which have indexes of their own.
        let mut rows = [b"ONLY ", bytes(name), b" AS ", ALIAS.to_bytes()].concat();
        let predicate = pg_sys::RelationGetIndexPredicate(index);
        if !predicate.is_null() {
            let predicate = pg_sys::make_ands_explicit(predicate).cast();
            rows.extend_from_slice(b" WHERE ");
            rows.extend_from_slice(&deparse(predicate, table));
        }
        rows
    }
}

/// # Safety
/// `expression` is one over the columns of the table alone.
unsafe fn deparse(expression: *mut pg_sys::Node, table: pg_sys::Oid) -> Vec<u8> {
    // SAFETY: by contract; the result is a NUL-terminated string.
    unsafe {
        let context = pg_sys::deparse_context_for(ALIAS.as_ptr(), table);
        bytes(pg_sys::deparse_expression(expression, context, true, false)).to_vec()
    }
}

/// `OPERATOR(schema.<->)`.
///
/// # Safety
/// `operator` is one.
unsafe fn operator_sql(operator: pg_sys::Oid) -> Vec<u8> {
    let (mut names, mut arguments) = (std::ptr::null_mut(), std::ptr::null_mut());
    // SAFETY: by contract; the first list is of strings, schema and name.
    unsafe {
        pg_sys::format_operator_parts(operator, &mut names, &mut arguments, false);
        let (Some(schema), Some(name)) = (list::nth(names, 0), list::nth(names, 1)) else {
            return Vec::new();
        };
        let schema = pg_sys::quote_identifier(schema);
        [b"OPERATOR(", bytes(schema), b".", bytes(name), b")"].concat()
    }
}

/// # Safety
/// `string` is null or NUL-terminated, and lives as long as the memory context.
unsafe fn bytes<'a>(string: *const c_char) -> &'a [u8] {
    if string.is_null() {
        return b"";
    }
    // SAFETY: by contract.
    unsafe { CStr::from_ptr(string) }.to_bytes()
}

fn sql(parts: &[&[u8]]) -> CString {
    // All parts come from NUL-terminated strings.
    CString::new(parts.concat()).unwrap_or_default()
}
