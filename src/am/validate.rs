//! Checks an operator class, for the SQL function `amvalidate()`.

use std::ffi::{CStr, c_char};

use pgrx::{pg_guard, pg_sys};

use super::handler::{STRATEGY_DISTANCE, SUPPORT_OPCLASS};

/// Whether the operator class has a distance operator for ordering and names its metric. What is wrong
/// is said at level INFO, as the access methods of Postgres itself do.
#[pg_guard]
pub unsafe extern "C-unwind" fn amvalidate(opclass: pg_sys::Oid) -> bool {
    // SAFETY: called by Postgres inside a transaction.
    unsafe {
        let Some(class) = syscache_row::<pg_sys::FormData_pg_opclass>(pg_sys::SearchSysCacheCopy(
            pg_sys::SysCacheIdentifier::CLAOID as i32,
            opclass.into(),
            0.into(),
            0.into(),
            0.into(),
        )) else {
            pgrx::info!("operator class {} does not exist", opclass.to_u32());
            return false;
        };
        let name = CStr::from_ptr(class.opcname.data.as_ptr()).to_string_lossy();
        let (family, input) = (class.opcfamily, class.opcintype);
        let mut valid = true;

        let operator = syscache_row::<pg_sys::FormData_pg_amop>(pg_sys::SearchSysCacheCopy(
            pg_sys::SysCacheIdentifier::AMOPSTRATEGY as i32,
            family.into(),
            input.into(),
            input.into(),
            STRATEGY_DISTANCE.into(),
        ));
        match operator {
            None => {
                pgrx::info!("operator class \"{name}\" lacks its distance operator");
                valid = false;
            }
            Some(operator) => {
                if operator.amoppurpose != pg_sys::AMOP_ORDER as c_char {
                    pgrx::info!("the operator of operator class \"{name}\" is not FOR ORDER BY");
                    valid = false;
                }
                if pg_sys::get_op_rettype(operator.amopopr) != pg_sys::FLOAT8OID {
                    pgrx::info!(
                        "the operator of operator class \"{name}\" does not return double precision"
                    );
                    valid = false;
                }
            }
        }

        let support = pg_sys::get_opfamily_proc(family, input, input, SUPPORT_OPCLASS as i16);
        if support == pg_sys::InvalidOid
            || pg_sys::get_func_nargs(support) != 0
            || pg_sys::get_func_rettype(support) != pg_sys::INT4OID
        {
            pgrx::info!(
                "operator class \"{name}\" lacks support function 1, of no argument and type integer"
            );
            valid = false;
        }
        valid
    }
}

/// The fixed part of a catalog row, copied.
///
/// # Safety
/// `tuple` is null or a tuple of the catalog whose form is `T`.
unsafe fn syscache_row<T: Copy>(tuple: pg_sys::HeapTuple) -> Option<T> {
    // SAFETY: the fixed part of a catalog row starts at t_hoff, suitably aligned.
    unsafe {
        let tuple = tuple.as_ref()?;
        let data = tuple.t_data.cast::<u8>();
        Some(*data.add((*tuple.t_data).t_hoff as usize).cast::<T>())
    }
}
